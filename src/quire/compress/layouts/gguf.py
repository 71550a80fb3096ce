"""GGUF files of model folders: the inverse of `quire.model.disk.gguf_model`, by that reader's own tables.

What the reader undoes is done here: rows of queries and keys are interleaved for rope where the architecture has them
so, and Gemma's norms get the one that is stored less. Before a weight is touched the metadata are read back: a model
whose facts do not come back as they are has something that GGUF's keys cannot say, and is refused. A layer that drafts
(`families.mtp`) is the block behind the model's last; where the format or the folder lacks it, the log says so.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.compress.layouts.gguf_assistants import (
    UNGROUPED,
    drafting_architecture,
    drafting_facts,
    open_source,
    read_back,
)
from quire.compress.layouts.gguf_facts import facts_of, same, same_turns, whole_rope
from quire.compress.layouts.gguf_images import decoders_of, images_file, write_images
from quire.compress.layouts.gguf_pieces import Piece, lists_of, pieces_of, shape_of
from quire.compress.layouts.gguf_pooled import check_dense, pooled_facts, pooled_tensors
from quire.compress.layouts.gguf_values import Values
from quire.compress.layouts.gguf_vocab import vocabulary
from quire.core.errors import ConfigError, ModelError
from quire.gguf.encode import ENCODERS
from quire.gguf.imatrix import Importance, read_imatrix
from quire.gguf.writer import TYPES, NewTensor, write_file, write_files
from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_architectures import ARCHITECTURES
from quire.model.disk.gguf_dense import SECTIONS
from quire.model.disk.gguf_names import NAMES, NEXTN, ROPE_TENSORS, STILL, WINDOW
from quire.model.disk.gguf_tensors import PLAIN
from quire.model.disk.headers import ModelHeaders
from quire.model.families.mtp import mtp_family
from quire.model.families.rope import Llama3, LongRope, Plain, Proportional
from quire.model.load.roles import DISK_ROLES
from quire.model.spec import ModelSpec
from quire.ops.weights import Weight

log = logging.getLogger(__name__)
NARROWER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Format for rows that are no whole number of its blocks -> one with shorter blocks, as llama.cpp chooses."""
SHORT = "F16"
"""Format for rows that are no whole number of blocks of 32."""
EXACT = ("positions", "token_types", "relative_bias", "encoder_relative_bias")
"""Tables that are kept in F32."""
UNTOLD = ("family", "norm", "interleaved_rope", "tied_head", "eos_token_ids", "rope", "sight")
"""Facts that tensors or the vocabulary say, that are compared in a way of their own, or that the file of what makes
rows of images says."""
DEEP = "n_deepstack_layers"


def write_gguf(
    folder: Path,
    path: Path,
    kind: str,
    weights: Mapping[str, Weight] | None = None,
    kinds: Mapping[str, str] | None = None,
    name: str = "",
    imatrix: Path | None = None,
    most: int = 0,
) -> None:
    """Write the model of `folder` (config.json, safetensors, tokenizer.json) as the GGUF file `path`.

    `kind`: format of the matrices, a name of `ENCODERS`: "F16", "Q8_0", "Q4_0", "Q4_K", ... The output head has Q6_K
    beside block formats of fewer bits, and rows that are no whole number of blocks the format that llama.cpp takes
    instead; vectors and the matrices that choose experts, or make gates of heads, are F32. `kinds` gives matrices
    formats of their own, by their names ("model.layers.0.mlp.up_proj"; experts lie in one tensor, whose format is that
    of the first). What makes rows of images becomes a second file beside `path` (`images_file`); where no file can, the
    log says why. `name`: what the file calls the model, "" = the folder's. `imatrix`: a file of llama-imatrix, by
    which the errors of columns are weighted. `most`: bytes of a file at most, of several that are written in place of
    `path` (`write_files`); 0 = one file. `weights` takes the place of the folder's matrices, by the same names: codes
    stay as they are where the format has the same groups. One tensor is in memory at a time, and the file is there
    whole or not at all. `ConfigError` for a family, a fact or a tokenizer that GGUF cannot hold, for an unknown `kind`,
    and where the disk is full; `ModelError` for a folder that cannot be read and for nan and inf, with the tensor's
    name.
    """
    weights, kinds = weights or {}, kinds or {}
    for one in (kind, *kinds.values()):
        if one not in ENCODERS:
            raise ConfigError(f"GGUF format {one!r} is not known; known: {', '.join(ENCODERS)}")
    opened = open_source(str(folder))
    if opened.folder.is_file():
        raise ConfigError(f"{folder} is a GGUF file; give the folder it was made of")
    check_dense(opened)
    important = None if imatrix is None else read_imatrix(imatrix)
    writer = _Writer(opened, *_architecture(opened), kind, weights, kinds, important or {}, str(imatrix))
    if important and not important.keys() & {piece.name for piece in writer.pieces}:
        raise ConfigError(f"{imatrix} names no matrix of {folder}: it is of another model")
    unknown = {*weights, *kinds} - {base for parts in writer.pieces for base in parts.bases}
    if unknown:
        raise ConfigError(f"{folder} has no matrix {sorted(unknown)[0]}")
    if UNGROUPED in opened.notes:
        log.warning("%s: %s", path.name, UNGROUPED)
    told = [note for note in opened.notes if "multi-token prediction" in note]
    if opened.mtp is not None and writer.drafts is None:
        told.append(f"files of {writer.arch} have no layer for multi-token prediction")
    for why in told:
        log.warning("%s: written without the layer that drafts: %s", path.name, why)
    metadata = writer.metadata() | ({"general.name": name} if name else {})
    tensors = writer.tensors()
    files = write_files(path, metadata, tensors, writer.data(), most or sum(tensor.nbytes for tensor in tensors))
    beside, form = images_file(path, kind)
    why = write_images(opened, beside, files[0], metadata["general.name"], form)
    if why:
        log.warning("%s: written without a file for images: %s", path.name, why)


def _architecture(opened: ModelHeaders) -> tuple[str, Architecture]:
    """Return GGUF's name of the family, and how its reader takes it; of a decoder that takes images, one to which the
    file for them belongs, if there is any."""
    if opened.spec.assistant.width:
        return drafting_architecture(opened.spec)
    family, beside = opened.spec.family, decoders_of(opened)
    written = [name for name, found in ARCHITECTURES.items() if found.writes(opened.spec)]
    own = [name for name in beside if name in ARCHITECTURES and family in ARCHITECTURES[name].rows]
    for name in (*(name for name in written if name in beside), *own, *written):
        return name, ARCHITECTURES[name]
    known = sorted({row for a in ARCHITECTURES.values() if not a.read_only for row in a.rows})
    raise ConfigError(f"{opened.folder}: a model of {family!r} cannot be written as GGUF; can be: {', '.join(known)}")


@dataclass
class _Writer:
    """A writer of what the model's tensors and facts become."""

    opened: ModelHeaders
    arch: str
    architecture: Architecture
    kind: str
    weights: Mapping[str, Weight]
    kinds: Mapping[str, str]
    important: Importance = field(default_factory=dict)
    imatrix: str = ""
    pieces: list[Piece] = field(init=False)
    behind: dict[str, np.ndarray[Any, Any]] = field(init=False)
    """Matrices and vectors behind pooled rows."""

    def __post_init__(self) -> None:
        names, layers = {**NAMES, **self.architecture.called(self.opened.spec)}, self.opened.spec.layers
        outer = {"embed": -1}
        self.pieces = sorted(
            pieces_of(self.opened, self.architecture, names),
            key=lambda p: outer.get(p.role, layers) if p.layer is None else p.layer,
        )
        self.behind = pooled_tensors(self.opened, self.architecture)
        if self.drafts is not None:
            family = replace(self.opened.family, names=names, mtp=self.architecture.mtp)
            self.pieces += pieces_of(self.drafts, self.architecture, mtp_family(family, layers).names)

    @property
    def drafts(self) -> ModelHeaders | None:
        """The layer that drafts, where the file is to have it."""
        return self.opened.mtp if NEXTN in self.architecture.known else None

    def metadata(self) -> dict[str, Any]:
        """Return the file's metadata, which were read back; `ConfigError` names a fact that would be another."""
        spec = self.opened.spec
        found: dict[str, Any] = {"general.architecture": self.arch, "general.name": self.opened.name}
        if self.kind not in PLAIN:
            found["general.quantization_version"] = 2
        found |= {
            f"{self.arch}.{key}": value for key, value in facts_of(self.opened, self.architecture, self.drafts).items()
        }
        found |= lists_of(self.opened, self.architecture) | drafting_facts(self.arch, spec)
        found |= pooled_facts(self.opened, self.architecture, f"{self.arch}.", self.behind)
        if spec.sight.sections and SECTIONS in self.architecture.known:
            found[f"{self.arch}.{SECTIONS}"] = np.array([*spec.sight.sections, 0], np.int32)
        if DEEP in self.architecture.known:
            found[f"{self.arch}.{DEEP}"] = spec.sight.deep
        first, ends = (None, ()) if spec.bidirectional else (spec.bos_token_id, spec.eos_token_ids)
        found |= vocabulary(self.opened.folder, spec.vocab_size, first, ends)
        if found.get(f"{self.arch}.{WINDOW[0]}") and WINDOW[1] in self.architecture.extra:
            every = (*spec.windows, *(self.drafts.spec.windows if self.drafts is not None else ()))
            found[f"{self.arch}.{WINDOW[1]}"] = np.array([window > 0 for window in every])
        wrong = self._difference(found)
        if wrong:
            raise ConfigError(f"{self.opened.folder}: GGUF has no key for the model's {wrong}, which differs from what "
                              f"readers take of a {self.arch} file")  # fmt: skip
        return found

    def _difference(self, metadata: dict[str, Any]) -> str:
        """Name the first fact that a reader of these metadata would take for another, "" if there is none."""
        with tempfile.TemporaryDirectory() as folder:
            path, ropes = Path(folder) / "facts.gguf", self._rope_factors()
            infos = [NewTensor(name, "F32", (len(t),)) for name, t in ropes.items()]
            names = (*(piece.name for piece in self.pieces), *self.behind)
            infos += [NewTensor(name, "F32", (1,)) for name in names]
            write_file(path, metadata, infos, (*ropes.values(), *(np.zeros(1, "<f4") for _ in names)))
            read = read_back(path, self.opened.spec.assistant.width > 0)
        spec = self.opened.spec if self.architecture.stored is None else self.architecture.stored(self.opened.spec)
        if spec.bidirectional:  # whose first and last tokens the tokenizer alone puts
            spec = replace(spec, bos_token_id=read.bos_token_id, eos_token_ids=())
        if not set(spec.eos_token_ids) <= set(read.eos_token_ids):
            return "end tokens"
        wrong = (f.name for f in fields(ModelSpec) if f.name not in UNTOLD
                 and not same(getattr(spec, f.name), getattr(read, f.name)))  # fmt: skip
        turned = all(same_turns(a, b, spec.max_position) for a, b in zip(spec.rope, read.rope, strict=True))
        return next(wrong, "" if turned else "rope")

    def _rope_factors(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return tensors of factors by which frequencies are divided."""
        rope = whole_rope(self.opened.spec)
        scaling = rope.scaling
        if isinstance(scaling, LongRope):
            sets = (np.array(scaling.short, "<f4"), np.array(scaling.long, "<f4"))
            return dict(zip(ROPE_TENSORS[1:], sets, strict=True))
        if isinstance(scaling, Llama3):
            plain, widest = (
                Plain().inverse_frequencies(rope.theta, rope.dim, 0),
                max(r.dim for r in self.opened.spec.rope),
            )
            factors = plain / scaling.inverse_frequencies(rope.theta, rope.dim, 0)
            return {ROPE_TENSORS[0]: np.pad(factors, (0, (widest - rope.dim) // 2), constant_values=1)}
        if isinstance(scaling, Proportional):
            stay = np.arange(rope.dim // 2) >= scaling.turned
            return {ROPE_TENSORS[0]: np.where(stay, STILL, scaling.factor).astype("<f4")}
        return {}

    def tensors(self) -> list[NewTensor]:
        """List what the file holds, in order."""
        ropes = [NewTensor(name, "F32", (len(t),)) for name, t in self._rope_factors().items()]
        own = [NewTensor(p.name, self._kind(p), shape_of(p, self.architecture)) for p in self.pieces]
        return ropes + own + [NewTensor(name, "F32", t.shape) for name, t in self.behind.items()]

    def data(self) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the bytes of each tensor."""
        yield from self._rope_factors().values()
        values = Values(self.architecture, self.weights, self.important, self.imatrix)
        for piece in self.pieces:
            kind = self._kind(piece)
            try:
                data = [values.encoded(piece, at, kind) for at in range(len(piece.bases))]
            except ModelError as error:
                raise ModelError(f"{self.opened.folder}: {piece.name}: {error.message}") from None
            yield data[0] if len(data) == 1 else np.concatenate(data)
            piece.of.source.give_back()
        yield from self.behind.values()

    def _kind(self, piece: Piece) -> str:
        """Choose the format of a tensor."""
        role = DISK_ROLES[piece.role]
        if role.integers:
            return "I32"
        plain = role.kind not in ("linear", "table") or piece.role in EXACT
        if piece.part == "bias" or role.wide or plain:
            return "F32"
        kind = self.kinds.get(piece.bases[0], self.kind)
        heads = ("head", "embed") if piece.of.spec.tied_head else ("head",)
        if piece.role in heads and piece.bases[0] not in self.kinds and kind not in PLAIN and kind != "Q8_0":
            kind = "Q6_K"
        k = role.shape(piece.of.spec.at(piece.layer))[1]
        if k % TYPES[kind][1].numbers:
            kind = NARROWER.get(kind, SHORT)
        return SHORT if k % TYPES[kind][1].numbers else kind
