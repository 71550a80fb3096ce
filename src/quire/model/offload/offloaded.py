"""Layers without the numbers of their matrices, and matrices whose numbers are wherever they were put.
See docs/design/offload.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.core.dtypes import Dtype
from quire.core.tree_map import rebuilt
from quire.ops.arrays import Host, dtype_of, equal, view_as
from quire.ops.backend import Ops
from quire.ops.native import ALIGN, HUGE, huge_bytes
from quire.ops.weights import Packed

PAGE = 4096
"""What addresses, offsets and sizes of reads past the system's cache are multiples of."""


@dataclass(frozen=True)
class ArrayOffset:
    """Where an array lies in the bytes of its layer."""

    offset: int
    dtype: Dtype
    shape: tuple[int, ...]

    def of(self, data: Any) -> Any:
        """The array as a view of `data` (uint8)."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return view_as(data[self.offset : self.offset + size], self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class OffloadedMatrix:
    """A packed matrix whose parts (`Ops.take_apart`) are somewhere else: `bare` is it without them."""

    bare: Packed
    places: Mapping[str, ArrayOffset]


class OffloadedLayer:
    """A layer's matrices as they leave: `skeleton` is the layer without them, `size` their bytes in whole pages."""

    def __init__(self, layer: Any, ops: Ops) -> None:
        self.size, self._ops = 0, ops
        self._parts: list[tuple[ArrayOffset, Any]] = []
        self.skeleton = rebuilt(layer, lambda part: self._leave(part) if isinstance(part, Packed) else part)
        self.size = -(-self.size // PAGE) * PAGE

    def write(self, into: Any) -> None:
        """Copy their numbers to `into` (uint8 [size])."""
        for place, part in self._parts:
            place.of(into)[...] = part

    def equals(self, data: Any) -> bool:
        """Whether `data` holds what `write` would put there."""
        return all(equal(place.of(data), part) for place, part in self._parts)

    def _leave(self, packed: Packed) -> OffloadedMatrix:
        assert packed.plain is None, "the reference's own weights stay"
        bare, parts = self._ops.take_apart(packed)
        places = {}
        for name, part in parts.items():
            places[name] = ArrayOffset(self.size, dtype_of(part), tuple(part.shape))
            self._parts.append((places[name], part))
            self.size += -(-part.nbytes // ALIGN) * ALIGN
        return OffloadedMatrix(bare, places)


def returned(skeleton: Any, data: Any, ops: Ops) -> Any:
    """The layer of a skeleton with the numbers of its matrices in `data`."""

    def here(part: Any) -> Any:
        if not isinstance(part, OffloadedMatrix):
            return part
        return ops.put_together(part.bare, {name: place.of(data) for name, place in part.places.items()})

    return rebuilt(skeleton, here)


def pages(size: int) -> Host:
    """`size` bytes (uint8) that begin on a page."""
    return huge_bytes(max(size, HUGE))[:size]
