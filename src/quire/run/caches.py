"""The KV cache in memory: who has which part of it, and the work on whole blocks."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from quire.core.plan import StepPlan
from quire.model.build import Model
from quire.ops.backend import Ops
from quire.ops.layout import KVCache, KVLayout
from quire.run.budget import KVPlan


def kept_layers(models: Sequence[Model]) -> tuple[dict[int, int], dict[int, KVLayout]]:
    """Windows and layouts of the layers with keys and values of their own, those of all models numbered on."""
    windows: dict[int, int] = {}
    layouts: dict[int, KVLayout] = {}
    first = 0
    for model in models:
        windows |= {first + i: window for i, window in model.spec.own_windows.items()}
        layouts |= {first + i: model.layouts[i] for i in model.spec.own_layers}
        first += model.spec.layers
    return windows, layouts


class Caches:
    """Keys and values of all layers: `own`, each once, `of_layer`, by layer, and the layers' `group_of` block tables.

    The layers of a draft model are further layers of the same blocks, so that whoever has a block has both models'
    keys and values of its tokens: `part` is what one model sees. On a GPU a block behind the last one, `pad_block`,
    takes what rows that pad a step write. Where ranks share sequences, block i lies on rank i % ranks along that axis;
    whatever names a block here names it among those of all.
    """

    def __init__(self, models: Sequence[Model], ops: Ops, kv: KVPlan) -> None:
        self._ops = ops
        self.block_size, self.pad_block = kv.sizes.block_size, kv.blocks
        self._lanes, self._lane = kv.sizes.holders, models[0].place.along("context")
        spare = 0 if ops.gpu is None else 1
        layouts = [layout for model in models for layout in model.layouts]
        self.own: list[KVCache] = [
            ops.allocate_cache(layouts[i], kv.blocks // self._lanes + spare) for i in kv.groups.widest
        ]
        homes: list[tuple[int, int]] = []
        self._parts: list[range] = []
        for model in models:
            first = len(homes)
            homes += [kv.groups.home(first + model.spec.kv_layer(i)) for i in range(model.spec.layers)]
            self._parts.append(range(first, len(homes)))
        self.of_layer = [self.own[place] for _, place in homes]
        self.group_of = [group for group, _ in homes]

    def part(self, index: int, layers: int | None = None) -> Caches:
        """The caches as the model of that index sees them, or its first `layers`."""
        own, part = self._parts[index], copy.copy(self)
        own = own[:layers]
        part.of_layer, part.group_of = self.of_layer[own.start : own.stop], self.group_of[own.start : own.stop]
        return part

    @property
    def blocks(self) -> int:
        """How many are in this process, that of a GPU's padding included."""
        return self.own[0].keys.shape[0]

    def prepare(self, plan: StepPlan) -> None:
        """Move, wipe and copy what `plan` says, before its rows are computed."""
        if plan.moves:
            self.move(plan.moves)
        if plan.scrub:
            self.zero(plan.scrub)
        if plan.copies:
            self.copy(plan.copies)

    def move(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Move slots, (source, destination), in every layer."""
        self._ops.move_slots(self.own, pairs)

    def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy blocks, (source, destination), in every layer."""
        own = ((source // self._lanes, to // self._lanes) for source, to in pairs if to % self._lanes == self._lane)
        self._ops.copy_blocks(self.own, tuple(own))

    def zero(self, blocks: tuple[int, ...]) -> None:
        """Wipe `blocks` in every layer."""
        own = (block // self._lanes for block in blocks if block % self._lanes == self._lane)
        self._ops.zero_blocks(self.own, tuple(own))

    def forget(self, count: int) -> None:
        """Wipe the first `count` blocks of each rank, of which `blocks` are here."""
        self.zero(tuple(range(count * self._lanes)))
