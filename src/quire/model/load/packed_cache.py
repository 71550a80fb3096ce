"""Keeps a model's packed matrices on disk, so that the next start neither converts nor quantizes (`--cache-packed`).
See docs/design/loading.md.

The file is never trusted: it must come from the same model files, options and code, its checksums must be right, and
each matrix must have the shape that the model's config asks for. Otherwise the weights are made anew and the file is
replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.config import EngineConfig
from quire.core.dtypes import F32, Dtype
from quire.core.files import LoadProgress
from quire.core.machine import foreign
from quire.core.version import VERSION
from quire.model.disk.headers import ModelHeaders
from quire.model.load.packed_file import DamagedCache, Entry, read_data, read_index
from quire.model.load.packed_folder import (
    NoRoom,
    beginning,
    ending,
    folder_of,
    make_room,
    mark_used,
    remove_leftovers,
)
from quire.model.load.packed_writing import Writing, WrittenMatrix
from quire.model.load.roles import Share
from quire.ops.arrays import AnyArray, Host
from quire.ops.backend import Ops
from quire.ops.native import huge_bytes
from quire.ops.weights import Packed, PackedFacts, PackedForm, Weight
from quire.quant.base import Quantizer
from quire.quant.registry import laid_out

log = logging.getLogger(__name__)
HEADER_BYTES = 1 << 16
SMALLEST = 64 << 20
"""Bytes of packed weights below which nothing is kept unless a folder is named: packing them takes no time."""


@dataclass(frozen=True)
class CacheLimits:
    """Bytes: `most` of all files in the folder, `least` of one that is worth it."""

    most: int
    least: int


class PackedCache:
    """The packed matrices of one model under one set of options, by name; `load` fills it, or else the reader does.

    If something was lacking, `keep` has all of it written.
    """

    def __init__(self, path: Path, source: str, form: PackedForm, limits: CacheLimits) -> None:
        self.path = path
        self._source, self._form, self._limits = source, form, limits
        self._kept: dict[str, WrittenMatrix] = {}
        self._used: dict[str, WrittenMatrix] = {}
        self._made = False

    def load(self, progress: LoadProgress) -> None:
        """Read the file when there is one that can be used; otherwise say why not and hold nothing."""
        remove_leftovers(self.path.parent)
        try:
            if reason := foreign(self.path):
                log.warning("packed weights in %s are not used: %s; making them anew", self.path, reason)
                return
            index, offset = read_index(self.path)
            if index.source != self._source:
                log.info("%s belongs to other weights, options or another version; making it anew", self.path)
                return
            data = huge_bytes(max(1, index.size))[: index.size]
            read_data(self.path, offset, index, data, progress)
            self._kept = {name: self._restore(entry, data) for name, entry in index.entries.items()}
            mark_used(self.path)
        except FileNotFoundError:
            return
        except (DamagedCache, OSError) as error:
            log.warning("packed weights in %s cannot be used: %s; making them anew", self.path, error)

    def get(self, name: str, n: int, k: int) -> WrittenMatrix | None:
        """The matrix `name`, when it is there with the shape [n, k] that the model asks for."""
        kept = self._kept.get(name)
        if kept is None:
            return None
        if (kept.packed.n, kept.packed.k) != (n, k):
            log.warning("%s: %s has another shape than [%d, %d]; making it anew", self.path, name, n, k)
            return None
        self._used[name] = kept
        return kept

    def find(self, name: str, shape: tuple[int, int]) -> WrittenMatrix | None:
        """Work like `get`, of a matrix whose bias has a number per row."""
        kept = self.get(name, *shape)
        return kept if kept is None or kept.bias is None or len(kept.bias) == shape[0] else None

    def put(self, name: str, packed: Packed, bias: AnyArray | None) -> None:
        """Take a matrix that was made just now."""
        self._made = True
        self._used[name] = WrittenMatrix(packed, bias, self._form)

    def keep(self) -> Writing | None:
        """Begin to write what the model uses, in the background, if some of it is new and there is room for it."""
        size = sum(kept.nbytes for kept in self._used.values())
        if not self._made or size < self._limits.least:
            return None
        try:
            make_room(self.path, size, self._limits.most)
        except (NoRoom, OSError) as error:
            log.info("packed weights are not kept in %s: %s", self.path.parent, error)
            return None
        return Writing(self.path, self._source, self._used)

    def _restore(self, entry: Entry, data: Any) -> WrittenMatrix:
        """The matrix of `entry` as views of `data`."""
        facts = PackedFacts(entry.kind, entry.n, entry.k, entry.group, entry.wide, entry.activation_bits)
        parts = {name: data[begin : begin + size] for name, (begin, size) in entry.parts.items()}
        bias = parts.pop("bias", None)
        if bias is not None and bias.nbytes % 4:
            raise DamagedCache(f"a bias has {bias.nbytes} bytes")
        try:
            packed = self._form.restore(facts, parts)
        except ValueError as error:
            raise DamagedCache(str(error)) from None
        return WrittenMatrix(packed, None if bias is None else bias.view(F32), self._form)


def packed_cache(
    config: EngineConfig, opened: ModelHeaders, ops: Ops, dtype: Dtype, target: Quantizer | None, share: Share
) -> PackedCache | None:
    """The cache that `--cache-packed` asks for, or None.

    "auto" is none where there is nothing it could keep, or where weights are only laid out anew: their file would take
    the disk that the model takes, and save nothing (llama-1b in Q4_K_M: 0.29 s to pack, 0.23 to read; Zen 4). Beside
    a folder that was named, what there is nothing to keep of is refused (`quire.core.exclusions`).
    """
    options = config.model
    auto = options.cache_packed == "auto"
    form, dummy = ops.form, options.load_format == "dummy"
    if options.cache_packed == "off" or config.offload.moves or form is None or dummy:
        return None
    plain = target is None and laid_out(opened.scheme) and options.activations != "int16"
    if auto and plain and not form.narrows:
        return None
    name = f"{beginning(options)}{dtype.name}"
    files = sorted({info.file for info in opened.source.infos.values()})
    base = opened.folder.parent if opened.folder.is_file() else opened.folder
    paths = [base / file for file in files]
    name += form.label
    name += "" if options.activations == "auto" else f"-a{options.activations}"
    name += "" if share.world == 1 else f"-rank{share.rank}of{share.world}"
    name += "" if share.layers is None else f"-layers{share.layers.start}to{share.layers.stop - 1}"
    name += "" if share.experts is None else f"-experts{share.experts.rank}of{share.experts.world}"
    name += ending(paths[0])
    declared = json.dumps(opened.config.child("quantization_config").raw, sort_keys=True)
    facts = [VERSION, name, target.name if target else "", repr(opened.spec), declared, _layout(form, target)]
    facts.append(str(share.step))
    if share.experts is not None:
        facts.append(repr([share.held(layer, opened.spec) for layer in range(opened.spec.layers)]))
    limits = CacheLimits(int(options.cache_packed_gib * 2**30), SMALLEST if auto else 0)
    return PackedCache(folder_of(options) / name, _fingerprint(facts, paths), form, limits)


def _fingerprint(facts: list[str], paths: list[Path]) -> str:
    """A digest of `facts` and of each file's name, size, time of change and first bytes (its header)."""
    found = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    for path in paths:
        status = path.stat()
        with path.open("rb") as file:
            start = hashlib.blake2b(file.read(HEADER_BYTES), digest_size=16).hexdigest()
        found.update(json.dumps([path.name, status.st_size, status.st_mtime_ns, start]).encode())
    return found.hexdigest()


def _layout(form: PackedForm, target: Quantizer | None) -> str:
    """A digest of small matrices as packed and quantized now: a layout or a rounding that changed is another source."""

    def weight(quantizer: Quantizer) -> Callable[[Host], Weight]:
        return lambda numbers: quantizer.quantize(numbers, 32).weight

    return form.digest([weight(each) for each in ((target, target.head) if target else ())])
