"""A folder of heads that guess ahead: config.json and safetensors, each tensor of which is read once or an error."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from quire.core.dtypes import F32, Dtype
from quire.core.errors import ModelError
from quire.model.disk.checkpoint import PICKLED, Checkpoint, resolve
from quire.model.disk.hf_config import HfConfig, read_json
from quire.model.net.parts import Linear
from quire.ops.arrays import Array, cast_to, concat, contiguous
from quire.ops.backend import Ops
from quire.ops.weights import Weight
from quire.quant.base import QWeight, float_kind


class HeadFile:
    """A head's `config`, and its tensors by name, checked against the target's sizes and packed for `ops` in
    `dtype`."""

    def __init__(self, model: str, ops: Ops, dtype: Dtype, named: Callable[[str], str] = str) -> None:
        """`named`: a tensor's name on disk -> that by which it is asked for."""
        self.folder = resolve(model)
        if self.folder.is_file():
            raise ModelError(f"{self.folder} is GGUF; heads are read from a folder with config.json and *.safetensors")
        pickled = next((p.name for pattern in PICKLED for p in self.folder.glob(pattern)), None)
        if pickled is not None and not any(self.folder.glob("*.safetensors")):
            raise ModelError(
                f"{self.folder} has only pickled weights ({pickled}), which can run code when read; read them where "
                "you trust them, and write the tensors with safetensors.torch.save_file"
            )
        self.config = HfConfig(read_json(self.folder / "config.json"), str(self.folder / "config.json"))
        self.nbytes = 0
        self._ops, self._dtype, self._source = ops, dtype, Checkpoint(self.folder)
        self._names: Mapping[str, str] = {named(name): name for name in self._source.infos}
        self._left = set(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def find(self, pattern: str) -> list[str]:
        """The names that match all of `pattern`."""
        return [name for name in self._names if re.fullmatch(pattern, name)]

    def rows(self, name: str) -> int:
        """How many the matrix `name` has; 0 where there is none."""
        info = self._source.infos.get(self._names.get(name, ""))
        return info.shape[0] if info is not None and info.shape else 0

    def tensor(self, name: str, *shape: int) -> Array:
        """The tensor `name` as it lies on disk; `ModelError` naming it when it is missing or not of `shape`."""
        if name not in self._names:
            raise ModelError(f"{self.folder}: {name} is missing")
        found = self._source.tensor(self._names[name])
        if tuple(found.shape) != shape:
            raise ModelError(f"{self.folder}: {name} is {list(found.shape)}, the target needs {list(shape)}")
        self._left.discard(name)
        return found

    def vector(self, name: str, size: int) -> Array:
        """A norm's weight or a bias, f32 on the device."""
        vector = cast_to(self.tensor(name, size), F32, copy=True)
        self.nbytes += vector.nbytes
        placed: Array = self._ops.put(vector)
        return placed

    def linear(self, names: Mapping[str, int], k: int, rows: Array | None = None) -> Linear:
        """The matrices `names` (name without ".weight" -> rows n) below each other, [sum n, k], with their biases.

        `rows`: those that are kept of it.
        """
        weight = concat([cast_to(self.tensor(f"{name}.weight", n, k), self._dtype) for name, n in names.items()])
        weight = weight if rows is None else weight[rows]
        packed = QWeight(Weight(float_kind(self._dtype), contiguous(weight))).pack(self._ops)
        self.nbytes += packed.nbytes
        bias = None
        if any(f"{name}.bias" in self for name in names):
            bias = concat([self._bias(f"{name}.bias", n) for name, n in names.items()])
        made: Linear = self._ops.place(Linear(packed, bias))
        return made

    def _bias(self, name: str, n: int) -> Array:
        return self.vector(name, n) if name in self else self._ops.zeros((n,))

    def table(self, name: str, rows: int, width: int) -> Array:
        """A look-up table, in the dtype of the matrices."""
        found = cast_to(self.tensor(name, rows, width), self._dtype, copy=True)
        self.nbytes += found.nbytes
        placed: Array = self._ops.put(found)
        return placed

    def finish(self) -> None:
        """`ModelError` naming a tensor that nothing has read: it would do something that is not done."""
        if self._left:
            raise ModelError(f"{self.folder}: nothing reads the tensor {min(self._left)}")
        self._source.give_back()


def spread(ops: Ops, logits: Array, ids: Array | None, vocab_size: int) -> Array:
    """Logits [n, tokens that heads know] as [n, vocab_size], -inf where they know none; ids None: they know all."""
    if ids is None:
        return logits
    full: Any = ops.zeros((len(logits), vocab_size))
    full[:] = -math.inf
    full[:, ids] = logits
    return cast(Array, full)
