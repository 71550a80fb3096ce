"""Experts that do not fit in memory are read from a file when a router chooses them (`--weight-offload experts`).

All layers share one pool of slots, each of which holds an expert's matrices; whoever was chosen most stays. A layer's
experts are in its descriptors once and for all: kernels add where each one lies (`places`, csrc/matrix.h).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.core.tree_map import parts_of, rebuilt
from quire.model.load.placement import PlacedLayers, held_bytes
from quire.model.net.decoder import Layer, Resident
from quire.model.net.moe import CutExperts, Experts, FusedExperts
from quire.model.offload.budget import Budget, OffloadAccount
from quire.model.offload.offloaded import PAGE, pages
from quire.model.offload.spill_file import SpillFile
from quire.model.offload.stream import Stream, StreamCounts
from quire.ops.arrays import Array, Host, address
from quire.ops.backend import Ops
from quire.ops.experts import Choices, Grouped
from quire.ops.native import ALIGN, huge_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExpertMatrices:
    """A layer's matrices of one role without numbers. `places` part -> where an expert's begin, and how many bytes."""

    grouped: Grouped
    places: dict[str, tuple[int, int]]


class SpilledExperts(msgspec.Struct, frozen=True, eq=False):
    """A layer's experts in the file, `stride` bytes each from `offset` on. Nobody looks for parts of it."""

    experts: FusedExperts | CutExperts
    stacks: tuple[ExpertMatrices, ExpertMatrices]
    count: int
    stride: int
    offset: int


class ExpertKeeper:
    """Writes the experts of layers to a file as they are loaded, while the budget leaves no room for them."""

    def __init__(self, ops: Ops, budget: Budget, folder: Path) -> None:
        self._ops, self._account, self._folder = ops, OffloadAccount(budget), folder
        self._file: SpillFile | None = None

    def take(self, index: int, layer: Layer) -> Any:
        """The layer, whose experts may be `SpilledExperts`."""
        found = next(iter(parts_of(layer, (FusedExperts, CutExperts))), None)
        size = 0 if found is None else found.gate_up.packed.nbytes + found.down.packed.nbytes
        fixed = held_bytes(layer) - size
        if self._account.stays(size, fixed, 0) or found is None:
            return layer
        return self._spilled(layer)

    def finish(self, layers: Sequence[Any], outer: int) -> PlacedLayers:
        """Experts that are in the file come from there, or all are in memory where that is enough."""
        account = self._account
        room = account.budget.most - outer - account.fixed
        if sum(account.sizes) <= room:
            return PlacedLayers(tuple(rebuilt(layer, self._back) for layer in layers), Resident())
        layers = [self._spilled(layer) for layer in layers]
        found = parts_of(layers, SpilledExperts)
        assert self._file is not None
        self._file.written()
        slot, most = max(s.stride for s in found), max(s.count for s in found)
        if room < slot * most:
            needed = outer + account.fixed + slot * most
            raise account.too_small(needed, "all but the experts, and those of one layer")
        slots = min(room // slot, sum(s.count for s in found))
        pool = ExpertPool(self._ops, self._file, found, slot, slots)
        log.info(
            "%d of %d experts have room in memory, others are read from %s as they are chosen",
            slots, sum(s.count for s in found), self._folder,
        )  # fmt: skip
        return PlacedLayers(tuple(rebuilt(layer, pool.called) for layer in layers), pool)

    def _spilled(self, layer: Any) -> Any:
        """`layer` with its experts in the file, if it has any that are not."""
        return rebuilt(layer, lambda part: self._spill(part) if isinstance(part, (FusedExperts, CutExperts)) else part)

    def _spill(self, experts: FusedExperts | CutExperts) -> SpilledExperts:
        if self._file is None:
            self._file = SpillFile(self._ops, self._folder)
        count, at = experts.down.experts, 0
        stacks, parts = list[ExpertMatrices](), list[tuple[int, int, Host]]()
        for grouped in (experts.gate_up, experts.down):
            bare, found = self._ops.take_apart(grouped.packed)
            places = {}
            for name, part in found.items():
                size = len(part) // count
                places[name] = at, size
                parts.append((at, size, part))
                at += -(-size // ALIGN) * ALIGN
            stacks.append(ExpertMatrices(replace(grouped, packed=bare), places))
        stride = -(-at // PAGE) * PAGE

        def fill(into: Host) -> None:
            rows = into.reshape(count, stride)
            for begin, size, part in parts:
                rows[:, begin : begin + size] = part.reshape(count, size)

        offset = self._file.put(count * stride, fill)
        bare_experts = replace(experts, gate_up=stacks[0].grouped, down=stacks[1].grouped)
        return SpilledExperts(bare_experts, (stacks[0], stacks[1]), count, stride, offset)

    def _back(self, part: Any) -> Any:
        """Experts in memory again."""
        if not isinstance(part, SpilledExperts):
            return part
        assert self._file is not None
        data = self._file.get(part.offset, part.count * part.stride).reshape(part.count, part.stride)

        def whole(stack: ExpertMatrices) -> Grouped:
            parts = {}
            for name, (begin, size) in stack.places.items():
                parts[name] = huge_bytes(part.count * size)
                parts[name].reshape(part.count, size)[:] = data[:, begin : begin + size]
            return replace(stack.grouped, packed=self._ops.put_together(stack.grouped.packed, parts))

        return replace(part.experts, gate_up=whole(part.stacks[0]), down=whole(part.stacks[1]))


class ExpertPool:
    """Experts in memory, and the file that others are read from (`LayerSource`: layers themselves stay)."""

    recordable = True

    def __init__(self, ops: Ops, file: SpillFile, layers: Sequence[SpilledExperts], slot: int, slots: int) -> None:
        self._ops, self._memory = ops, pages(slot * slots)
        self._places = [np.full(layer.count, -1, np.int64) for layer in layers]
        self._number = {id(layer): number for number, layer in enumerate(layers)}
        rows = [
            (file.file, layer.offset, layer.stride, layer.count, int(places.ctypes.data))
            for layer, places in zip(layers, self._places, strict=True)
        ]
        table, keeps = np.array(rows, np.int64), (self._memory, self._places, file)
        at = address(self._memory), slot, slots, int(table.ctypes.data), len(rows)
        self._stream = Stream(ops, "stream_experts", keeps, file.cached, *at)

    def called(self, part: Any) -> Any:
        """Experts that are read when they are called, of what was spilled."""
        if not isinstance(part, SpilledExperts):
            return part
        number = self._number[id(part)]
        first, last = (self._placed(stack, number) for stack in part.stacks)
        return OnDemand(replace(part.experts, gate_up=first, down=last), self.need, number)

    def need(self, layer: int, offsets: Host) -> None:
        """Have the experts that own pairs, by their offsets int32 [1, experts + 1], in memory."""
        self._stream.call("stream_need", layer, offsets)

    def before(self, layer: int) -> None:
        """Layers are in memory, but for what their routers choose."""

    def after(self, layer: int) -> None:
        """Experts stay until others need their room."""

    def counts(self) -> StreamCounts:
        """What was read so far, and how long steps waited."""
        return self._stream.counts()

    def _placed(self, stack: ExpertMatrices, number: int) -> Grouped:
        """Matrices whose parts begin where the first slot's do; kernels add the expert's place."""
        parts = {name: self._memory[begin : begin + size] for name, (begin, size) in stack.places.items()}
        packed = self._ops.put_in_places(stack.grouped.packed, parts, self._places[number])
        return replace(stack.grouped, packed=packed)


@dataclass(frozen=True)
class OnDemand:
    """Experts that come when they are chosen."""

    experts: Experts
    need: Callable[[int, Host], None]
    number: int

    def __call__(self, ops: Ops, x: Array, choices: Choices) -> Array:
        """x [T, hidden] -> [T, hidden]."""
        self.need(self.number, choices[2])
        found: Host = self.experts(ops, x, choices)
        return found
