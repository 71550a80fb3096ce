"""Layers that do not fit in memory are read from a file, ahead of the walk (`--weight-offload disk`).

Which ones stay is spread evenly over the model, so that the disk always has a slot to fill: while layers that stay are
computed, those that come are read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.model.load.placement import PlacedLayers
from quire.model.net.decoder import Layer, Resident
from quire.model.offload.budget import Budget, OffloadAccount
from quire.model.offload.offloaded import OffloadedLayer, returned
from quire.model.offload.spill_file import SpillFile
from quire.model.offload.stream import SLOTS, Segment, Streamed
from quire.ops.backend import Ops

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpilledLayer:
    """A layer in the file: `size` bytes from `offset` on."""

    skeleton: Any
    offset: int
    size: int


class DiskKeeper:
    """Writes layers to a file as they are loaded, as many as the budget asks for; `finish` sees to what was guessed."""

    def __init__(self, ops: Ops, budget: Budget, folder: Path) -> None:
        self._ops, self._account, self._folder = ops, OffloadAccount(budget), folder
        self._file: SpillFile | None = None

    def take(self, index: int, layer: Layer) -> Any:
        """The layer, or what stands for it while its numbers are in the file."""
        leaving = OffloadedLayer(layer, self._ops)
        return layer if self._account.stays(leaving.size, 0, SLOTS) else self._spill(leaving)

    def finish(self, layers: Sequence[Any], outer: int) -> PlacedLayers:
        """All layers where they belong, now that their sizes are known."""
        found, most = list(layers), self._account.budget.most - outer
        if sum(self._account.sizes) <= most:
            found = [self._back(layer) for layer in found]
        else:
            self._settle(found, most)
        away = {i: layer for i, layer in enumerate(found) if isinstance(layer, SpilledLayer)}
        if not away:
            if self._file is not None:
                self._file.close()
            return PlacedLayers(tuple(found), Resident())
        assert self._file is not None
        self._file.written()
        sizes = {i: layer.size for i, layer in away.items()}
        segments = [Segment(turn, self._file.file, s.offset, s.size, 0) for turn, s in enumerate(away.values())]
        source = Streamed(self._ops, sizes, segments, self._file.cached, self._file)
        for i, spilled in away.items():
            found[i] = returned(spilled.skeleton, source.slot_of(i), self._ops)
        log.info(
            "%d of %d layers stay in memory, %d (%s bytes) are read from %s in every step",
            len(found) - len(away), len(found), len(away), f"{source.nbytes:,}", self._folder,
        )  # fmt: skip
        return PlacedLayers(tuple(found), source)

    def _settle(self, found: list[Any], most: int) -> None:
        """Make `found` take `most` bytes, slots included, or as little less as can be."""
        sizes = self._account.sizes

        def taken() -> int:
            away = [sizes[i] for i, layer in enumerate(found) if isinstance(layer, SpilledLayer)]
            return sum(sizes) - sum(away) + min(SLOTS, len(away)) * max(away, default=0)

        while taken() > most:
            held = [i for i, layer in enumerate(found) if not isinstance(layer, SpilledLayer)]
            if not held:
                needed = taken() + self._account.budget.most - most
                raise self._account.too_small(needed, f"what is outside of layers and {SLOTS} layers")
            found[held[-1]] = self._spill(OffloadedLayer(found[held[-1]], self._ops))
        for i, layer in enumerate(found):
            if isinstance(layer, SpilledLayer) and taken() + layer.size <= most:
                found[i] = self._back(layer)

    def _spill(self, leaving: OffloadedLayer) -> SpilledLayer:
        if self._file is None:
            self._file = SpillFile(self._ops, self._folder)
        return SpilledLayer(leaving.skeleton, self._file.put(leaving.size, leaving.write), leaving.size)

    def _back(self, layer: Any) -> Any:
        """A layer in memory again."""
        if not isinstance(layer, SpilledLayer):
            return layer
        assert self._file is not None
        return returned(layer.skeleton, self._file.get(layer.offset, layer.size), self._ops)
