"""The KV cache in memory: who has which part of it, and the work on whole blocks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from quire.core.dtypes import U8
from quire.model.build import Model
from quire.model.mixers.mixer import CachePart
from quire.model.mixers.table import kept_parts
from quire.ops.backend import Ops
from quire.ops.layout import KVCache, KVLayout, carved
from quire.run.budget import KVPlan


def parts_of(models: Iterable[Model]) -> dict[int, CachePart]:
    """What layers with keys and values of their own keep, those of all models numbered on."""
    return kept_parts((model.spec, model.layouts) for model in models)


Home = tuple[int, int]
"""A group of layers, and a place in its blocks."""


def _allocated(
    ops: Ops, kv: KVPlan, homes: Mapping[Home, KVLayout], layouts: Sequence[KVLayout], blocks: int
) -> tuple[list[KVCache], dict[Home, KVCache]]:
    """The memory of `blocks` blocks, each part of it once, and what of it the layer in each of `homes` has.

    `layouts`: of all layers by their numbers. Where groups keep different bytes, a block's are one part, and a layer
    has some of them; else each place is a part, which the layers of all groups take turns to have.
    """
    groups = kv.groups
    if groups.sizes:
        size = kv.sizes.block_size
        whole = ops.allocate_cache(ops.layout(size, 1, groups.width // 2, U8), blocks)
        return [whole], {home: carved(whole, layout, size * home[1] // 2) for home, layout in homes.items()}
    kept = {
        place: ops.allocate_cache(layouts[groups.widest[place]], blocks) for place in sorted({at for _, at in homes})
    }
    return list(kept.values()), {home: carved(kept[home[1]], layout, 0) for home, layout in homes.items()}


class Caches:
    """Keys and values of all layers that are here: `own`, each once, `of_layer`, by layer, and `group_of` block tables.

    The layers of a draft model are further layers of the same blocks, so that whoever has a block has both models'
    keys and values of its tokens: `part` is what one model sees. On a GPU a block behind the last one, `pad_block`,
    takes what rows that pad a step write. Where ranks share sequences, block i lies on rank i % ranks along that axis;
    whatever names a block here names it among those of all. `through` [blocks + 1] says up to which of its slots a
    block holds what the draft model keeps; its last entry is of no block.
    """

    def __init__(self, models: Sequence[Model], ops: Ops, kv: KVPlan) -> None:
        self._ops = ops
        self.block_size, self.pad_block = kv.sizes.block_size, kv.blocks
        self._lanes, self._lane = kv.sizes.holders, models[0].place.along("context")
        spare = int(ops.pads)
        layouts = [layout for model in models for layout in model.layouts]
        homes: list[tuple[Home, int]] = []
        self._parts: list[range] = []
        first = 0
        for model in models:
            had = len(homes)
            sources = [first + model.spec.kv_layer(i) for i in model.own]
            homes += [(kv.groups.home(source), source) for source in sources]
            self._parts.append(range(had, len(homes)))
            first += model.spec.layers
        self.own, kept = _allocated(ops, kv, {home: layouts[layer] for home, layer in homes}, layouts,
                                    kv.blocks // self._lanes + spare)  # fmt: skip
        self._kept = None if set(map(id, kept.values())) <= set(map(id, self.own)) else kept
        self.of_layer = [kept[home] for home, _ in homes]
        self.group_of = [group for (group, _), _ in homes]
        self.through = np.zeros(self.blocks + 1, np.int32)

    def part(self, index: int, layers: int | None = None) -> Caches:
        """The caches as the model of that index sees them, or its first `layers`."""
        own, part = self._parts[index], copy.copy(self)
        own = own[:layers]
        part.of_layer, part.group_of = self.of_layer[own.start : own.stop], self.group_of[own.start : own.stop]
        return part

    @property
    def blocks(self) -> int:
        """How many are in this process, that of a GPU's padding included."""
        return len(self.own[0].keys)

    def move(self, moves: tuple[tuple[int, int, int], ...]) -> None:
        """Move slots, (source, destination, table that has them), in every layer of that table."""
        if self._kept is None:
            self._ops.move_slots(self.own, tuple((source, to) for source, to, _ in moves))
            return
        for group in sorted({table for *_, table in moves}):
            layers = [cache for (of, _), cache in self._kept.items() if of == group]
            self._ops.move_slots(layers, tuple((source, to) for source, to, table in moves if table == group))

    def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy blocks, (source, destination), in every layer."""
        own = ((source // self._lanes, to // self._lanes) for source, to in pairs if to % self._lanes == self._lane)
        self._ops.copy_blocks(self.own, tuple(own))

    def zero(self, blocks: tuple[int, ...]) -> None:
        """Wipe `blocks` in every layer."""
        own = (block // self._lanes for block in blocks if block % self._lanes == self._lane)
        self._ops.zero_blocks(self.own, tuple(own))

    def forget(self, count: int, written: Sequence[KVCache] = ()) -> None:
        """Wipe the first `count` blocks of each rank, of which `blocks` are here, of the layers with the caches
        `written`, of all without: memory that was never written is not there yet, and stays so."""
        alone = written and self._kept is None
        self._ops.zero_blocks(list({id(cache): cache for cache in written}.values()) if alone else self.own,
                              tuple(range(count)))  # fmt: skip
