"""A GPU's layers that stay in the host's memory are copied ahead of the walk (`--cpu-offload-gb`).

Copies have a queue of their own: neither the ops of a step nor the arrays of the next one wait for what is not theirs.
Steps are not captured: a graph may not end with copies under way that the next one's first layers need.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.core.dtypes import U8
from quire.core.errors import ConfigError
from quire.model.load.placement import PlacedLayers
from quire.model.net.decoder import Layer, Resident
from quire.model.offload.offloaded import OffloadedLayer, returned
from quire.ops.backend import Ops
from quire.ops.runtime import QueueEvent

log = logging.getLogger(__name__)
SLOTS = 2
"""Layers that come: one is computed while the next is copied."""


@dataclass(frozen=True)
class OnHost:
    """A layer in page-locked memory."""

    skeleton: Any
    data: Tensor


class HostKeeper:
    """Keeps `most` bytes of layers on the host, spread evenly over the model. `layers`: bytes of each on disk."""

    def __init__(self, ops: Ops, most: int, layers: Sequence[int]) -> None:
        self._ops, self._most, self._layers = ops, most, layers
        self._made = self._away = 0

    def take(self, index: int, layer: Layer) -> Any:
        """The layer, or what stands for it while its numbers are on the host."""
        leaving = OffloadedLayer(layer, self._ops)
        self._made += leaving.size
        whole = self._made / max(1, sum(self._layers[: index + 1])) * sum(self._layers)
        share = min(1.0, self._most / max(1.0, whole)) * self._made
        if self._away + leaving.size > self._most or self._away + leaving.size // 2 > share:
            return layer
        self._away += leaving.size
        data = self._ops.runtime.pinned(leaving.size)
        leaving.write(data)
        return OnHost(leaving.skeleton, data)

    def finish(self, layers: Sequence[Any], outer: int) -> PlacedLayers:
        """Layers that are away find their numbers in slots of the device."""
        found = list(layers)
        away = {i: layer.data for i, layer in enumerate(found) if isinstance(layer, OnHost)}
        taken = SLOTS * max((len(data) for data in away.values()), default=0)
        if self._away <= taken and self._most:
            raise ConfigError(
                f"--cpu-offload-gb {self._most / 2**30:g} spares no memory: {self._away:,} bytes would leave it, and "
                f"the {SLOTS} layers that come in turn take {taken:,}; give more, or leave it out",
                param="cpu_offload_gb",
            )
        if not away:
            return PlacedLayers(tuple(found), Resident())
        source = CopiedAhead(self._ops, away)
        for i in away:
            found[i] = returned(found[i].skeleton, source.slot_of(i), self._ops)
        log.info(
            "%d of %d layers (%s bytes) stay in the host's memory and are copied in every step",
            len(away), len(found), f"{self._away:,}",
        )  # fmt: skip
        return PlacedLayers(tuple(found), source)


class CopiedAhead:
    """Layers whose numbers lie in `hosts` (uint8, page-locked), and come to slots of the device in turn."""

    recordable = False

    def __init__(self, ops: Ops, hosts: Mapping[int, Tensor]) -> None:
        self._runtime, self._hosts = ops.runtime, list(hosts.values())
        self._turn = {layer: turn for turn, layer in enumerate(hosts)}
        largest = max(len(data) for data in self._hosts)
        count = min(SLOTS, len(self._hosts))
        self._slots: list[Tensor] = [ops.zeros((largest,), U8) for _ in range(count)]
        self._holds = list(range(count))
        self._there = [self._copy(turn) for turn in range(count)]

    def slot_of(self, layer: int) -> Tensor:
        """Where the numbers of `layer` lie when it runs."""
        return self._slots[self._turn[layer] % len(self._slots)]

    def before(self, layer: int) -> None:
        """Have the main queue wait for the layer, unless it stays on the device."""
        turn = self._turn.get(layer)
        if turn is None:
            return
        slot = turn % len(self._slots)
        if self._holds[slot] != turn:
            self._ask(turn)
        self._runtime.wait_for(self._there[slot])

    def after(self, layer: int) -> None:
        """What comes next in its slot is copied once the main queue has come this far."""
        turn = self._turn.get(layer)
        if turn is None:
            return
        slots = len(self._slots)
        following = turn + slots if turn + slots < len(self._hosts) else turn % slots
        if following != turn:
            self._ask(following)

    def _ask(self, turn: int) -> None:
        slot = turn % len(self._slots)
        self._holds[slot], self._there[slot] = turn, self._copy(turn)

    def _copy(self, turn: int) -> QueueEvent:
        """Copy a layer behind all that the main queue holds by now: it may still read the slot."""
        data = self._hosts[turn]
        return self._runtime.ahead([(self._slots[turn % len(self._slots)][: len(data)], data)])
