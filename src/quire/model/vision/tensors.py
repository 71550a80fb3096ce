"""The tensors of a vision part as roles have them: matrices of two axes, named `base.weight` and `base.bias`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType

from quire.model.disk.checkpoint import TensorInfo, TensorSource
from quire.ops.arrays import AnyArray

PARTS = (".weight", ".bias")


class VisionMatrices:
    """A `TensorSource` of some tensors of another, brought to the form that roles have.

    A parameter that is no module's is a weight: `x` is seen as `x.weight`, less its axes of length 1, its last axis as
    columns, a number alone as a vector. The kernel of a
    convolution [n, channels, ...] becomes a matrix [n, k] whose columns are the pixels of a patch in their order, the
    channels of each together, as they lie in an image. Of bases in `turned` the matrix is [k, n] in the file; those in
    `grouped`, vectors too, have the numbers of each patch within those of a row, or of a channel, of which there are so
    many, and become as kernels do.
    """

    def __init__(
        self,
        source: TensorSource,
        names: Iterable[str],
        turned: Collection[str] = (),
        grouped: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._source, self._turned, self._grouped = source, turned, grouped
        self.infos: dict[str, TensorInfo] = {}
        self._from: dict[str, str] = {}
        for name in names:
            seen = name if name.endswith(PARTS) else f"{name}.weight"
            info = source.infos[name]
            self.infos[seen] = replace(info, shape=self._shape(seen, info.shape, name))
            self._from[seen] = name

    def _shape(self, seen: str, shape: tuple[int, ...], name: str) -> tuple[int, ...]:
        if seen != name:
            while len(shape) > 1 and shape[0] == 1:
                shape = shape[1:]
            shape = (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else shape or (1,)
        flat = (shape[0], prod(shape[1:])) if len(shape) > 2 else shape
        return flat[::-1] if seen.removesuffix(".weight") in self._turned else flat

    def tensor(self, name: str) -> AnyArray:
        """The tensor `name`; the caller must not write to it."""
        found, base = self._source.tensor(self._from[name]), name.removesuffix(".weight")
        shape = self.infos[name].shape
        if base in self._turned:
            return found.reshape(shape[::-1]).T
        channels = found.shape[1] if len(found.shape) > 3 else self._grouped.get(base, 0)
        if not channels:
            return found.reshape(shape)
        return found.reshape(*shape[:-1], channels, -1).swapaxes(-1, -2).reshape(shape)

    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read the tensors `names`."""
        self._source.read_ahead([self._from[name] for name in names])

    def give_back(self) -> None:
        """Give back the memory of what was read; tensors handed out stay valid."""
        self._source.give_back()
