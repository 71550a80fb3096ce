"""The KV cache in memory: who has which part of it, and the work on whole blocks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from quire.model.batch import Batch
from quire.model.build import Model
from quire.model.mixers.layer_mixers import in_tables, kept_by_layer, lasting_of
from quire.model.mixers.mixer import LayerCacheSpec
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import CacheLayout, KVCache, LayerCache, SharedLayout, carved, with_states
from quire.run.kv_budget import KVPlan


def kept_by(models: Iterable[Model]) -> dict[int, LayerCacheSpec]:
    """What layers with a cache of their own keep, those of all models numbered on."""
    return kept_by_layer((model.spec, model.layouts) for model in models)


def state_bytes(models: Iterable[Model]) -> int:
    """Bytes of the recurrent states of a sequence, in all layers: so all stages have as many slots."""
    return sum(state.nbytes for model in models for state in model.states if state is not None)


Home = tuple[int, int]
"""A group of layers, and a place in its blocks."""
NOWHERE: Home = (0, -1)
"""Of a layer that keeps nothing of a token."""


def _allocated(
    ops: Ops, kv: KVPlan, homes: Mapping[Home, CacheLayout], blocks: int
) -> tuple[list[KVCache], dict[Home, LayerCache]]:
    """The memory of `blocks` blocks, each array of it once, and what of it the layer in each of `homes` has.

    Where groups keep different bytes, a block's are one array, and a layer has some of them. Else each place has arrays
    of its own, which the layers of all groups take turns to have: one if their parts lie in different ways.
    """
    groups, size = kv.groups, kv.sizes.block_size
    if groups.sizes:
        whole = ops.allocate_cache(SharedLayout.of(size, groups.width), blocks)
        return [whole], {home: _carved_from(whole, parts, size * home[1]) for home, parts in homes.items()}
    own, kept = list[KVCache](), dict[Home, LayerCache]()
    for place in sorted({at for _, at in homes}):
        here = {home: parts for home, parts in homes.items() if home[1] == place}
        parts = next(iter(here.values()))
        if set(here.values()) == {parts}:
            made = tuple(ops.allocate_cache(layout, blocks) for layout in parts)
            kept |= dict.fromkeys(here, made)
        else:
            made = (ops.allocate_cache(SharedLayout.of(size, sum(each.bytes_per_token for each in parts)), blocks),)
            kept |= {home: _carved_from(made[0], each, 0) for home, each in here.items()}
        own += made
    return own, kept


def _carved_from(whole: KVCache, parts: CacheLayout, at: int) -> LayerCache:
    """The parts behind each other, from byte `at` of a block on."""
    found = []
    for layout in parts:
        found.append(carved(whole, layout, at))
        at += layout.block_size * layout.bytes_per_token
    return tuple(found)


class Caches:
    """Caches of all layers that are here: `own`, each array once, `of_layer`, by layer, and `group_of` block tables;
    `states`, of the layers that have recurrent ones.

    The layers of a draft model are further layers of the same blocks, so that whoever has a block has both models'
    keys and values of its tokens: `part` is what one model sees. On a GPU a block behind the last one, `pad_block`,
    takes what rows that pad a step write. Where ranks share sequences, block i lies on rank i % ranks along that axis;
    whatever names a block here names it among those of all; `blocks` are in this process, that of a GPU's padding
    included, even where none of its layers keeps anything of tokens. `through` [blocks + 1] says up to which of its
    slots a block holds what the draft model keeps; its last entry is of no block.
    """

    def __init__(self, models: Sequence[Model], ops: Ops, kv: KVPlan) -> None:
        self._ops = ops
        self.block_size, self.pad_block = kv.sizes.block_size, kv.blocks
        self._lanes, self._lane = kv.sizes.holders, models[0].place.along("context")
        spare = int(ops.pads)
        layouts = [layout for model in models for layout in model.layouts]
        homes: list[tuple[Home, Home]] = []
        held: dict[Home, CacheLayout] = {}
        self._parts: list[range] = []
        first = 0
        for model in models:
            had = len(homes)
            sources = [first + model.spec.kv_layer(i) for i in model.own]
            for source in sources:
                numbers = zip((source, lasting_of(source)), in_tables(layouts[source]), strict=True)
                own, lasting = ((kv.groups.home(n) if parts else NOWHERE, parts) for n, parts in numbers)
                homes.append((own[0], lasting[0]))
                held |= {home: parts for home, parts in (own, lasting) if home != NOWHERE}
            self._parts.append(range(had, len(homes)))
            first += model.spec.layers
        self.blocks = kv.blocks // self._lanes + spare
        self.own, kept = _allocated(ops, kv, held, self.blocks)
        parts = {id(part) for cache in kept.values() for part in cache}
        self._kept = None if parts <= set(map(id, self.own)) else kept
        self.of_layer = [kept.get(own, ()) + kept.get(lasting, ()) for own, lasting in homes]
        states = [state for model in models for state in model.own_states]
        self.states: list[Array] = []
        for i, layout in enumerate(states):
            if layout is not None:
                self.states.append(ops.zeros(layout.shape(kv.states.slots)))
                self.of_layer[i] = with_states(self.of_layer[i], self.states[-1])
        self.group_of = [own[0] for own, _ in homes]
        self._lasting_of = [own[0] if lasting == NOWHERE else lasting[0] for own, lasting in homes]
        self.through = np.zeros(self.blocks + 1, np.int32)

    def part(self, index: int, layers: Sequence[int] | None = None) -> Caches:
        """The caches as the model of that index sees them, or those of some of its `layers`, in that order."""
        own, part = self._parts[index], copy.copy(self)
        held = own if layers is None else [own[layer] for layer in layers]
        part.of_layer, part.group_of = [self.of_layer[i] for i in held], [self.group_of[i] for i in held]
        part._lasting_of = [self._lasting_of[i] for i in held]
        return part

    @property
    def tables(self) -> list[int]:
        """The block tables that its layers read."""
        return sorted({*self.group_of, *self._lasting_of})

    def views(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Each layer's of `batches`, one for each table; none where there is one table."""
        if len(batches) == 1:
            return ()
        pairs = list(zip(self.group_of, self._lasting_of, strict=True))
        made = {
            (own, lasting): batches[own]
            if own == lasting
            else replace(batches[own], lasting_tables=batches[lasting].block_tables)
            for own, lasting in set(pairs)
        }
        return [made[pair] for pair in pairs]

    def move(self, moves: tuple[tuple[int, int, int], ...]) -> None:
        """Move slots, (source, destination, table that has them), in every layer of that table."""
        if self._kept is None:
            self._ops.move_slots(self.own, tuple((source, to) for source, to, _ in moves))
            return
        for group in sorted({table for *_, table in moves}):
            layers = [part for (of, _), cache in self._kept.items() if of == group for part in cache]
            self._ops.move_slots(layers, tuple((source, to) for source, to, table in moves if table == group))

    def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy blocks, (source, destination), in every layer."""
        own = ((source // self._lanes, to // self._lanes) for source, to in pairs if to % self._lanes == self._lane)
        self._ops.copy_blocks(self.own, tuple(own))

    def zero(self, blocks: tuple[int, ...]) -> None:
        """Wipe `blocks` in every layer."""
        own = (block // self._lanes for block in blocks if block % self._lanes == self._lane)
        self._ops.zero_blocks(self.own, tuple(own))

    def forget(self, count: int, written: Sequence[LayerCache] = ()) -> None:
        """Wipe the first `count` blocks of each rank, of which `blocks` are here, of the layers with the caches
        `written`, of all without: memory that was never written is not there yet, and stays so."""
        alone = written and self._kept is None
        parts = {id(part): part for cache in written for part in cache}
        self._ops.zero_blocks(list(parts.values()) if alone else self.own, tuple(range(count)))
