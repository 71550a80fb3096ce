"""What becomes of a layer that was loaded, before the next one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.model.net.decoder import Layer
from quire.model.net.source import LayerSource, Resident


@dataclass(frozen=True)
class Kept:
    """Layers as the decoder gets them, and where their weights come from."""

    layers: tuple[Layer, ...]
    source: LayerSource


class Keeper(Protocol):
    """Keeps the layers of one decoder."""

    def take(self, index: int, layer: Layer) -> Layer:
        """What stands for `layer` until all are there; layers come in order."""
        ...

    def finish(self, layers: Sequence[Layer], outer: int) -> Kept:
        """`layers`: what `take` returned, in order; `outer`: bytes of weights outside of layers."""
        ...


class InMemory:
    """Layers stay as they are."""

    def take(self, index: int, layer: Layer) -> Layer:
        """The layer itself."""
        return layer

    def finish(self, layers: Sequence[Layer], outer: int) -> Kept:
        """The layers themselves."""
        return Kept(tuple(layers), Resident())
