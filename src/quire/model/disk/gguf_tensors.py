"""The tensors of a GGUF model as a `Source`, from one file or from several (llama-gguf-split).
See docs/design/weight-formats.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from quire.core.dtypes import BF16, F16, F32, F64, I8, I16, I32, I64, U8, Dtype
from quire.core.files import shard_number, shards_of
from quire.gguf.file import GgufFile, GgufTensor
from quire.model.disk.checkpoint import TensorInfo, give_back, read_ahead, view
from quire.model.disk.gguf_names import ONE_BELOW_OTHER, ROPE_TENSORS
from quire.ops.arrays import Host
from quire.quant.base import QuantScheme
from quire.quant.gguf import TYPES, Gguf
from quire.quant.registry import DENSE

PLAIN = {"F32": F32, "F16": F16, "BF16": BF16, "F64": F64, "I8": I8, "I16": I16, "I32": I32, "I64": I64}
SPLIT = {what: f"split.{what}" for what in ("no", "count", "tensors.count")}
"""Which of how many files one is, and how many tensors they have together."""


def open_files(path: Path) -> list[GgufFile]:
    """The files of the model whose file `path` is, the first before all; `ModelError` where one is missing or is not
    of this model."""
    file = GgufFile(path)
    count = file.metadata.get(SPLIT["count"], 0)
    if count in (0, 1):
        return [file]
    paths = shards_of(path)
    if len(paths) != count:
        name = "its name must end as that of the first of these, -00001-of-...gguf"
        raise file.fail(SPLIT["count"], f"the model is in {count!r:.40} files; {name}")
    if (number := shard_number(path)) != 1:
        raise file.fail(SPLIT["no"], f"it is number {number} of {count}; give the first, {paths[0]}")
    if missing := [each.name for each in paths if not each.exists()]:
        raise file.fail(SPLIT["count"], f"the model is in {count} files; {', '.join(missing[:6])} is missing beside it")
    files = [file, *(GgufFile(each) for each in paths[1:])]
    for i, each in enumerate(files):
        if (each.metadata.get(SPLIT["no"]), each.metadata.get(SPLIT["count"])) != (i, count):
            raise each.fail(SPLIT["no"], f"is not {i} of {count}: the file belongs to another model")
    total = sum(len(each.tensors) for each in files)
    if (told := file.metadata.get(SPLIT["tensors.count"], total)) != total:
        raise file.fail(SPLIT["tensors.count"], f"is {told!r:.40}, the {count} files have {total}; download them again")
    return files


class GgufTensors:
    """The tensors of a model's files as a `Source`: a quantized matrix `x.weight` is called x.Q4_K and is rows of
    bytes. `headers`: what the files say of each, by its name there."""

    def __init__(self, files: Sequence[GgufFile]) -> None:
        self.file = files[0]
        self.infos: dict[str, TensorInfo] = {}
        self.headers: dict[str, GgufTensor] = {}
        self._places: dict[str, tuple[GgufFile, GgufTensor]] = {}
        numbers: Counter[str] = Counter()
        for file in files:
            for tensor in file.tensors.values():
                if tensor.name in self.headers:
                    raise file.fail(tensor.name, "is in two of the model's files; download them again")
                self.headers[tensor.name] = tensor
                numbers[tensor.type.name] += math.prod(tensor.shape)
                name, info = self._info(file, tensor)
                if tensor.name not in ROPE_TENSORS:
                    self.infos[name] = info
                self._places[name] = file, tensor
        blocks = {name: count for name, count in numbers.items() if name in TYPES}
        self.scheme: QuantScheme = Gguf(blocks) if blocks else DENSE
        most = max(numbers, key=numbers.__getitem__, default="F32")
        self.dtype: Dtype = PLAIN.get(most, BF16)
        """Of most of the numbers; bfloat16 for a quantized file, whose other tensors are few."""

    def _info(self, file: GgufFile, tensor: GgufTensor) -> tuple[str, TensorInfo]:
        if tensor.type.name in PLAIN:
            one_row = (
                tensor.name.endswith("inp_shexp.weight") and len(tensor.shape) == 1
            )  # as older converters wrote it
            shape = (1, *tensor.shape) if one_row else tensor.shape
            if tensor.name.endswith(".ssm_norm.weight"):
                shape = (math.prod(shape),)  # a row for each group
            if tensor.name.endswith(ONE_BELOW_OTHER):
                shape = (math.prod(shape[:-1]), shape[-1])
            return tensor.name, TensorInfo(PLAIN[tensor.type.name], shape, file.path.name)
        *rows, k = tensor.shape
        width = k // tensor.type.numbers * tensor.type.nbytes
        name = f"{tensor.name.removesuffix('.weight')}.{tensor.type.name}"
        if not tensor.name.endswith(".weight") or not rows:
            raise file.fail(tensor.name, f"is quantized ({tensor.type.name}), only matrices can be")
        rows = [math.prod(rows)] if tensor.name.endswith(ONE_BELOW_OTHER) else rows
        return name, TensorInfo(U8, (*rows, width), file.path.name)

    def tensor(self, name: str) -> Host:
        """A view of the mapped file; the caller must not write to it."""
        info, (file, tensor) = self.infos[name], self._places[name]
        return view(file.data, info.dtype, info.shape, tensor.start)

    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read the tensors `names`."""
        spans: dict[Path, list[tuple[int, int]]] = {}
        for file, tensor in (self._places[name] for name in names):
            spans.setdefault(file.path, []).append((tensor.start, tensor.start + tensor.nbytes))
        for path, found in spans.items():
            read_ahead(path, found)

    def give_back(self) -> None:
        """Give back the memory of what was read; tensors handed out stay valid."""
        for file in {id(file): file for file, _ in self._places.values()}.values():
            give_back(file.data)

    def row(self, name: str) -> list[float]:
        """The numbers of a tensor that belongs to the header, a row of F32."""
        file, tensor = self._places[name]
        if tensor.type.name != "F32" or len(tensor.shape) != 1:
            raise file.fail(name, "needs a row of F32 numbers")
        found: list[float] = np.frombuffer(file.data, "<f4", tensor.shape[0], tensor.start).tolist()
        return found
