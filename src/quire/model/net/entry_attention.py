"""Attention to the last tokens and to entries before these (DeepSeek-AI 2026, "DeepSeek-V4"). See `quire.ops.entries`
for the order in which rows are computed."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.decoder import Layer, Wanted, chosen
from quire.model.net.latent import LowRankQuery
from quire.model.net.parts import Linear, NormSpans, Product, RmsNorm
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.entries import EntryReads, Pool
from quire.ops.indexer import Choice
from quire.ops.layout import KVCache, LayerCache
from quire.ops.weights import Packed


def paged(batch: Batch) -> tuple[Array, Array, Array]:
    """How ops read rows of tokens of `batch`."""
    return batch.cu_q, batch.context, batch.block_tables


def lasting_tables(batch: Batch) -> Array:
    """The block tables of entries, which are those of tokens where all layers have one table."""
    return batch.block_tables if batch.lasting_tables is None else batch.lasting_tables


@dataclass(frozen=True)
class MadeEntries:
    """What makes entries of rows: `numbers`, and `gates` which weigh them."""

    numbers: Linear
    gates: Linear
    pool: Pool

    def __call__(self, ops: Ops, h: Array, batch: Batch, rows: KVCache, entries: KVCache) -> None:
        """Write rows of h [T, hidden], and the entries whose last tokens these are."""
        x = ops.join_columns((self.numbers(ops, h), self.gates(ops, h)))
        ops.pool_entries(x, batch.slots, rows, entries, paged(batch), lasting_tables(batch), self.pool)


@dataclass(frozen=True)
class EntryIndexer:
    """An indexer: of each row the `most` entries with the highest scores. `q` reads the latent of queries, `weights`
    the rows; `made` makes its keys. Scores lack the factors that all have in common."""

    q: Product
    weights: Linear
    made: MadeEntries
    head_dim: int
    most: int

    def __call__(self, ops: Ops, layer: Layer, h: Array, latent: Array, batch: Batch, keys: KVCache) -> Array:
        """h [T, hidden], `latent` [T, q_rank] -> entries [T, most] int32, as of `choose_tokens`."""
        q = ops.rope_queries(self.q(ops, latent), batch.positions, layer.rope, 0, self.head_dim, None, 1.0)
        found: Array = ops.choose_tokens(
            q, self.weights(ops, h), keys, batch.cu_q, batch.context, lasting_tables(batch), Choice(self.most)
        )
        return found


@dataclass(frozen=True)
class EntryAttention:
    """Attention of a layer whose `qkv` makes a row's key, which is its value too. What heads find is turned back by
    `back`, the rope of their rows the other way, and goes through the matrix of each of `groups` of heads, `out`, to
    `o_rank` numbers.

    `query` makes heads, normed by `q_norm`; `k_norm` is of keys. `made`: where the layer has entries; `indexer`: where
    it chooses some.
    """

    query: LowRankQuery
    q_norm: NormSpans
    k_norm: RmsNorm
    back: Array
    out: Packed
    groups: int
    o_rank: int
    window: int
    made: MadeEntries | None = None
    indexer: EntryIndexer | None = None

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]; keys of all rows, and entries that they end, are written to `cache`."""
        latent, keys = self.query.latent(ops, h), cache[0]
        d = keys.layout.head_dim
        q = self.q_norm(ops, self.query.up(ops, latent), batch)
        k = self.k_norm(ops, layer.qkv(ops, h))
        heads = q.shape[1] // d
        q = ops.index_rope_and_cache(q, k, batch.positions, layer.rope, batch.slots, keys, heads)
        entries: KVCache | None = None
        picked: Array | None = None
        if self.made is not None:
            parts = len(cache) // 2
            entries = cache[1 + parts]
            self.made(ops, h, batch, cache[1], entries)
            if self.indexer is not None:
                self.indexer.made(ops, h, batch, cache[2], cache[2 + parts])
                picked = self.indexer(ops, layer, h, latent, batch, cache[2 + parts])
        reads = EntryReads(layer.attend.scale, self.window, layer.attend.sinks, picked)
        found = ops.entry_attention(q, keys, entries, paged(batch), lasting_tables(batch), reads)
        found = chosen(ops, ops.rope_queries(found, batch.positions, self.back, 0, d, None, 1.0), wanted)
        return layer.o(ops, ops.head_linear(found, self.out, self.groups, self.o_rank))
