"""Block-sparse attention (MiniMax M3): each head of keys and values is read in the blocks that an indexer chooses."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.decoder import Layer, Wanted, chosen, own_rows
from quire.model.net.parts import Linear, NormSpans, RmsNorm
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.indexer import BlockIndexer
from quire.ops.layout import LayerCache


@dataclass(frozen=True)
class BlockSparseAttention:
    """Work like `own_attention`, over tables of chosen blocks: each row is a sequence of its own to the op, which so
    needs no mask, and sums what it reads in the order of positions.

    `q` and `k` make queries, of as many heads as keys and values have, and a key of the indexer, which are normed.
    """

    q: Linear
    k: Linear
    q_norm: NormSpans
    k_norm: RmsNorm
    sizes: BlockIndexer

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]; keys, values and index keys of all rows are written to `cache`."""
        kv, keys = cache
        heads, d, rows = kv.layout.kv_heads, kv.layout.head_dim, h.shape[0]
        qkv = own_rows(ops, layer, h, batch, cache)
        group = (qkv.shape[1] // d - 2 * heads) // heads * d
        q, k = self.q_norm(ops, self.q(ops, h), batch), self.k_norm(ops, self.k(ops, h))
        q = ops.index_rope_and_cache(q, k, batch.positions, layer.rope, batch.slots, keys, heads)
        tables, contexts, ends = ops.choose_blocks(q, keys, batch.cu_q, batch.context, batch.block_tables, self.sizes)
        found = []
        for head in range(heads):
            own = ops.take_columns(qkv, head * group, group + 2 * d)  # what is behind the queries is not read
            table = tables[head * rows : (head + 1) * rows]
            found.append(ops.attention(own, kv.head(head), ends, contexts[head], table, layer.attend))
        attended = ops.join_columns(tuple(found)) if heads > 1 else found[0]
        return layer.o(ops, chosen(ops, attended, wanted))
