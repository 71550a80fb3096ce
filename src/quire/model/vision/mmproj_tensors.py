"""The tensors of a mmproj file as those of a folder lie: unquantized, and each kernel whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from quire.core.dtypes import F32
from quire.gguf.mmproj import Mmproj
from quire.gguf.projector_types import PATCH as PATCHES
from quire.gguf.projector_types import POSITIONS
from quire.model.disk.checkpoint import TensorInfo
from quire.model.disk.gguf_tensors import GgufTensors
from quire.ops.arrays import Host, to_numpy

PATCH = f"{PATCHES}.weight"
SECOND = ".1"
"""Ending of the name of a patch's kernel for the second of two frames."""
AUDIO = ("a.", "mm.a.")
"""Beginnings of names of what reads audio, in files of both."""
SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
"""Names of an MLP's matrices in files of older converters."""


class MmprojTensors:
    """A `TensorSource` of one file.

    Quantized matrices are taken apart to f32. Kernels [n, channels, height, width] of two frames are one of [n,
    channels, 2, height, width]. Axes of one before the others are left out, and tables of
    positions are one. The projectors of a stack are called by
    their places instead of by the layers `deep` behind which they read.
    """

    def __init__(self, found: Mmproj, deep: Sequence[int]) -> None:
        self._source = GgufTensors([found.file])
        self._row, self._deep = found.row, {f"{layer}": place for place, layer in enumerate(deep)}
        wide, hidden = found.shapes.get("v.blk.0.ffn_up.weight", ()), found.get("vision.embedding_length")
        self._called = SWAPPED if len(wide) == 2 and wide[0] == hidden != wide[1] else {}
        self._called |= {theirs: name for theirs, name in self._row.called.items()
                         if f"v.blk.0.{name}.weight" not in found.shapes}  # fmt: skip
        self.infos: dict[str, TensorInfo] = {}
        self._from: dict[str, str] = {}
        self._swapped: dict[str, tuple[int, ...]] = {}
        for name, info in self._source.infos.items():
            if name == PATCH + SECOND or name.startswith(AUDIO):
                continue
            quantized = name not in self._source.headers
            base = name.rpartition(".")[0]
            if quantized:
                info = replace(info, dtype=F32, shape=self._source.headers[f"{base}.weight"].shape)
            seen = self._seen(f"{base}.weight" if quantized else name)
            shape = _shape(info.shape)
            if seen in self._row.swapped:
                self._swapped[seen] = shape
            if seen == POSITIONS:
                shape = (prod(shape[:-1]), shape[-1])
            self._from[seen], self.infos[seen] = name, replace(info, shape=shape)
        if PATCH + SECOND in self._source.infos and PATCH in self.infos:
            n, channels, *side = self.infos[PATCH].shape
            self.infos[PATCH] = replace(self.infos[PATCH], shape=(n, channels, 2, *side))

    def _seen(self, name: str) -> str:
        stack = self._row.stack
        if stack and name.startswith(stack):
            layer, dot, part = name.removeprefix(stack).partition(".")
            return f"{stack}{self._deep.get(layer, layer)}{dot}{part}"
        if self._called and name.startswith("v.blk."):
            head, part, ending = name.rpartition(".")[0].rpartition(".")[0], *name.split(".")[-2:]
            return f"{head}.{self._called.get(part, part)}.{ending}"
        return name

    def tensor(self, name: str) -> Host:
        """The tensor `name`; the caller must not write to it."""
        origin, info = self._from[name], self.infos[name]
        found = self._source.tensor(origin)
        if origin not in self._source.headers:
            kind = origin.rpartition(".")[2]
            found = to_numpy(self._source.scheme.load({kind: found}, F32).dequantize())
        if len(info.shape) > len(found.shape):
            found = np.stack((found, self._source.tensor(origin + SECOND)), 2)
        if name in self._swapped:
            found = found.reshape(self._swapped[name]).swapaxes(0, 1)
        return found.reshape(info.shape)

    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read the tensors `names`."""
        self._source.read_ahead([self._from[name] for name in names])

    def give_back(self) -> None:
        """Give back the memory of what was read; tensors handed out stay valid."""
        self._source.give_back()


def _shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape
