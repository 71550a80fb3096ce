"""Layers without the numbers of their matrices, and matrices whose numbers are wherever they were put."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.core.dtypes import Dtype
from quire.core.rebuilt import rebuilt
from quire.ops.arrays import Host, dtype_of, equal, view_as
from quire.ops.cpu.arena import ALIGN, HUGE, huge_bytes
from quire.ops.cpu.matrix import SHARED, Matrix, Numbers, assemble, take_apart
from quire.ops.native import Native
from quire.ops.weights import Packed

PAGE = 4096
"""What addresses, offsets and sizes of reads past the system's cache are multiples of."""


@dataclass(frozen=True)
class Place:
    """Where an array lies in the bytes of its layer."""

    offset: int
    dtype: Dtype
    shape: tuple[int, ...]

    def of(self, data: Any) -> Any:
        """It as a view of `data` (uint8)."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return view_as(data[self.offset : self.offset + size], self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Away:
    """A packed matrix whose parts are somewhere else. `numbers` of one on the host; `shared` parts stay."""

    packed: Packed
    numbers: Numbers | None
    places: Mapping[str, Place]
    shared: Mapping[str, Any]

    def here(self, data: Any) -> Packed:
        """It with its parts in `data`, the bytes of its layer."""
        parts, packed = {name: place.of(data) for name, place in self.places.items()}, self.packed
        if self.numbers is not None:
            return assemble(packed.kind, (packed.n, packed.k), packed.group, self.numbers, {**parts, **self.shared})
        own = tuple(parts.values())
        handle = replace(packed.handle, **parts)
        return replace(packed, buffers=own, handle=handle)


class Leaving:
    """A layer's matrices as they leave: `skeleton` is the layer without them, `size` their bytes in whole pages."""

    def __init__(self, layer: Any) -> None:
        self.size = 0
        self._parts: list[tuple[Place, Any]] = []
        self.skeleton = rebuilt(layer, lambda part: self._leave(part) if isinstance(part, Packed) else part)
        self.size = -(-self.size // PAGE) * PAGE

    def write(self, into: Any) -> None:
        """Copy their numbers to `into` (uint8 [size])."""
        for place, part in self._parts:
            place.of(into)[...] = part

    def equals(self, data: Any) -> bool:
        """Whether `data` holds what `write` would put there."""
        return all(equal(place.of(data), part) for place, part in self._parts)

    def _leave(self, packed: Packed) -> Away:
        assert packed.plain is None, "the reference's own weights stay"
        if isinstance(packed.handle, Matrix):
            numbers, parts = take_apart(packed)
            shared = {name: part for name, part in parts.items() if name in SHARED}
            own = {name: part for name, part in parts.items() if name not in SHARED}
            return Away(replace(packed, buffers=(), handle=None), numbers, self._places(own), shared)
        found = {id(part) for part in packed.buffers}
        own = {name: part for name, part in vars(packed.handle).items() if id(part) in found}
        bare = replace(packed.handle, **dict.fromkeys(own))
        return Away(replace(packed, buffers=(), handle=bare), None, self._places(own), {})

    def _places(self, parts: Mapping[str, Any]) -> dict[str, Place]:
        places = {}
        for name, part in parts.items():
            places[name] = Place(self.size, dtype_of(part), tuple(part.shape))
            self._parts.append((places[name], part))
            self.size += -(-part.nbytes // ALIGN) * ALIGN
        return places


def returned(skeleton: Any, data: Any) -> Any:
    """The layer of a skeleton with the numbers of its matrices in `data`."""
    return rebuilt(skeleton, lambda part: part.here(data) if isinstance(part, Away) else part)


def pages(native: Native, size: int) -> Host:
    """`size` bytes (uint8) that begin on a page."""
    return huge_bytes(native, max(size, HUGE))[:size]
