"""A sequence's keys and values over several ranks, by whole splits: how rows come to what others have of their keys.
See docs/design/context-parallel.md.

What a rank finds of a row in the splits that it has are states, and these are folded in the order of splits wherever
they come from, so a row has the bits of one rank. Three ways, by what passes between ranks: states alone, where all
ranks compute all rows; where each computes its part of the rows, queries and states (pass-Q, Yang et al. 2024), or keys
and values (pass-KV, there; Ring Attention, Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Protocol

from quire.core.dtypes import F32
from quire.model.batch import Batch
from quire.model.net.decoder import (
    Attend,
    Decoder,
    Layer,
    Wanted,
    attended_heads,
    chosen,
    own_attention,
    own_rows,
    reading_attention,
    reading_rows,
)
from quire.model.net.gated_attention import GatedAttention, OutputGate
from quire.ops.arrays import Array, view_as
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops
from quire.ops.layout import KVCache, LayerCache
from quire.parallel.comm import Comm

Rows = Callable[[Ops, Layer, Array, Batch, LayerCache], Array]
"""h [T, hidden] -> what attention reads of the rows, as `own_rows` of the decoder."""


@dataclass(frozen=True, slots=True)
class KeyPages:
    """Where the keys of rows lie: `cu_q`, `context` and `block_tables` as of a `Batch`; -1: blocks of other ranks."""

    cu_q: Array
    context: Array
    block_tables: Array


@dataclass(frozen=True, slots=True)
class Fold:
    """Which states make the rows of this rank: `starts` and `order` as `fold_states` reads them."""

    starts: Array
    order: Array

    def __call__(self, ops: Ops, states: Array, width: int, cache: KVCache, spec: AttentionSpec) -> Array:
        """states [N, heads * (head_dim + 2)] of rows of `width` numbers -> [T, heads * head_dim]."""
        heads = width // cache.layout.head_dim - 2 * cache.layout.kv_heads
        rows: Array = ops.fold_states(states, self.starts, self.order, heads, spec.sinks)
        return rows


class KeyExchange(Protocol):
    """How the rows of this rank see keys of all ranks."""

    def __call__(self, ops: Ops, comm: Comm, qkv: Array, cache: KVCache, spec: AttentionSpec, writes: bool) -> Array:
        """qkv [T, (heads + 2 kv_heads) * head_dim], rotated -> [T, heads * head_dim]; `writes`: these keys are new."""
        ...


@dataclass(frozen=True, slots=True)
class PassStates:
    """All ranks have the same rows, whose keys each has stored where they are its own.

    `starts` [T + 1] of the states that rows leave here, `counts` of all that rows leave on each rank.
    """

    pages: KeyPages
    starts: Array
    counts: tuple[int, ...]
    fold: Fold

    def __call__(self, ops: Ops, comm: Comm, qkv: Array, cache: KVCache, spec: AttentionSpec, writes: bool) -> Array:
        """Implement `KeyExchange`."""
        p = self.pages
        states = ops.attention_states(qkv, cache, p.cu_q, p.context, p.block_tables, self.starts, spec)
        return self.fold(ops, comm.all_gather(ops, states, self.counts), qkv.shape[1], cache, spec)


@dataclass(frozen=True, slots=True)
class PassQueries:
    """Each rank has `rows[rank]` rows. All get all of them and store what is theirs; states go back to the rows' ranks.

    `pages`, `slots` and `starts` are of all rows, rank by rank; `sends` [world] int32: states that go to each rank;
    `most`: the most that any rank gets.
    """

    rows: tuple[int, ...]
    slots: Array
    pages: KeyPages
    starts: Array
    sends: Array
    most: int
    fold: Fold

    def __call__(self, ops: Ops, comm: Comm, qkv: Array, cache: KVCache, spec: AttentionSpec, writes: bool) -> Array:
        """Implement `KeyExchange`."""
        p, every = self.pages, comm.all_gather(ops, qkv, self.rows)
        if writes:
            ops.cache_rows(_kv(ops, every, cache), self.slots, cache)
        states = ops.attention_states(every, cache, p.cu_q, p.context, p.block_tables, self.starts, spec)
        found, _ = comm.all_to_all(ops, states, self.sends, self.most)
        return self.fold(ops, found, qkv.shape[1], cache, spec)


@dataclass(frozen=True, slots=True)
class PassKeys:
    """Each rank has `rows[rank]` rows. All get all keys: those of the rows, and the blocks that any of them sees.

    `slots` of all rows, rank by rank. `picks` [blocks[rank]] int32: which blocks of this rank; `pages`: where, in all
    ranks' blocks behind each other, the keys of this rank's rows lie.
    """

    rows: tuple[int, ...]
    slots: Array
    picks: Array
    blocks: tuple[int, ...]
    pages: KeyPages

    def __call__(self, ops: Ops, comm: Comm, qkv: Array, cache: KVCache, spec: AttentionSpec, writes: bool) -> Array:
        """Implement `KeyExchange`."""
        if writes:
            ops.cache_rows(comm.all_gather(ops, _kv(ops, qkv, cache), self.rows), self.slots, cache)
        layout, p = cache.layout, self.pages
        shapes = layout.shapes(sum(self.blocks))
        passed = (view_as(self._passed(ops, comm, t), layout.element) for t in (cache.keys, cache.values))
        whole = KVCache(layout, *(t.reshape(*shape) for t, shape in zip(passed, shapes, strict=True)))
        rows: Array = ops.attention(qkv, whole, p.cu_q, p.context, p.block_tables, spec)
        return rows

    def _passed(self, ops: Ops, comm: Comm, numbers: Array) -> Array:
        """All ranks' picks of a cache, as rows of words."""
        own = ops.pick_rows(view_as(numbers.reshape(len(numbers), -1), F32), self.picks)
        return comm.all_gather(ops, own, self.blocks)


def _kv(ops: Ops, qkv: Array, cache: KVCache) -> Array:
    """The keys and values of rows, [T, 2 * kv_heads * head_dim]."""
    width = 2 * cache.layout.kv_heads * cache.layout.head_dim
    kv: Array = ops.take_columns(qkv, qkv.shape[1] - width, width)
    return kv


@dataclass(frozen=True, slots=True)
class ContextParallelBatch(Batch):
    """The rows that this rank computes. `way`: how they see keys; without, they are sequences of this rank alone.

    `scored`: rows that want logits, by rank, and `order` [R] int32 their places behind each other in the order of the
    batch; None where every rank has them all.
    """

    way: KeyExchange | None = None
    scored: tuple[int, ...] = ()
    order: Array | None = None


@dataclass(frozen=True)
class ContextParallelAttention:
    """Attention of a layer whose keys and values are spread over ranks. `rows`: what makes queries, keys and values;
    `writes`: keys are new, and not those of an earlier layer. `gate`: of what attention gives, or None."""

    rows: Rows
    writes: bool
    comm: Comm
    gate: OutputGate | None = None

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """Implement `own_attention`."""
        gate = None if self.gate is None else self.gate.matrix(ops, h)
        qkv = self.rows(ops, layer, h, batch, cache)
        way = batch.way if isinstance(batch, ContextParallelBatch) else None
        if way is None:
            attended = attended_heads(ops, layer, qkv, batch, cache)
        else:
            attended = way(ops, self.comm, qkv, cache[0], layer.attend, self.writes)
        if self.gate is not None:
            attended = self.gate(ops, attended, gate)
        return layer.o(ops, chosen(ops, attended, wanted))


@dataclass(frozen=True)
class ContextParallelDecoder(Decoder):
    """`Decoder` of ranks that have parts of a step's rows; the first has the logits of all, the others none."""

    comm: Comm | None = None

    def last(self, x: Array, delta: Array, batch: Batch, wanted: Wanted) -> Array:
        """Implement `Decoder`, of all ranks' rows."""
        h = super().last(x, delta, batch, wanted)
        if not isinstance(batch, ContextParallelBatch) or batch.order is None or self.comm is None:
            return h
        rows: Array = self.ops.pick_rows(self.comm.all_gather(self.ops, h, batch.scored), batch.order)
        return rows

    def score(self, h: Array, batch: Batch) -> Array:
        """Implement `Decoder`; only the first rank's logits are read, so others make none."""
        follows = self.comm is not None and self.comm.rank > 0
        return h[:0] if follows and isinstance(batch, ContextParallelBatch) else super().score(h, batch)


def context_parallel(decoder: Decoder, comm: Comm) -> ContextParallelDecoder:
    """`decoder` of ranks that have splits of keys and values in turn."""
    layers = tuple(replace(layer, attention=_over_lanes(layer, comm)) for layer in decoder.layers)
    parts = {f.name: getattr(decoder, f.name) for f in fields(decoder)} | {"layers": layers}
    return ContextParallelDecoder(**parts, comm=comm)


def _over_lanes(layer: Layer, comm: Comm) -> ContextParallelAttention:
    """`KeyError` for attention that has no states: its maker is to refuse it."""
    if isinstance(layer.attention, GatedAttention):
        return ContextParallelAttention(own_rows, True, comm, layer.attention.gate)
    kinds: dict[Attend, tuple[Rows, bool]]
    kinds = {own_attention: (own_rows, True), reading_attention: (reading_rows, False)}
    return ContextParallelAttention(*kinds[layer.attention], comm)
