"""What becomes of what was loaded: parts are moved to the device, and layers kept, before the next one is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.core.tree_map import rebuilt
from quire.model.net.decoder import Layer, LayerSource, Resident
from quire.ops.arrays import address, is_array

Unplaced = Any
"""An array of a part of the decoder before `Ops.place` makes it one of ops': numpy's, or torch's of the workbench."""


def held_bytes(value: Any) -> int:
    """Bytes of all arrays in `value`, each counted once."""
    found: dict[int, int] = {}

    def look(part: Any) -> Any:
        if is_array(part):
            found[address(part)] = part.nbytes
        return part

    rebuilt(value, look)
    return sum(found.values())


@dataclass(frozen=True)
class PlacedLayers:
    """Layers as the decoder gets them, and where their weights come from."""

    layers: tuple[Layer, ...]
    source: LayerSource


class LayerKeeper(Protocol):
    """Keeps the layers of one decoder."""

    def take(self, index: int, layer: Layer) -> Layer:
        """What stands for `layer` until all are there; layers come in order."""
        ...

    def finish(self, layers: Sequence[Layer], outer: int) -> PlacedLayers:
        """`layers`: what `take` returned, in order; `outer`: bytes of weights outside of layers."""
        ...


class InMemory:
    """Layers stay as they are."""

    def take(self, index: int, layer: Layer) -> Layer:
        """The layer itself."""
        return layer

    def finish(self, layers: Sequence[Layer], outer: int) -> PlacedLayers:
        """The layers themselves."""
        return PlacedLayers(tuple(layers), Resident())
