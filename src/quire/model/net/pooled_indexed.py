"""Sparse attention whose indexer has one key for each block of tokens, the mean of theirs (Qwen4-Exp)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.decoder import Layer, Wanted, chosen, own_rows
from quire.model.net.gated_attention import OutputGate
from quire.model.net.parts import Linear, RmsNorm
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.convolution import Convolution
from quire.ops.indexer import PooledIndexer
from quire.ops.layout import LayerCache


@dataclass(frozen=True)
class PooledSparseAttention:
    """Work like `own_attention`, over tables of chosen blocks: each row is a sequence of its own to the op, which so
    needs no mask.

    `q` and `k` make queries and a key of the indexer. `pool` is the mean of a token's key and those before it, that of
    a block where the token is its last; normed, it is turned by `rope` as the block's first token is. `gate`: of what
    heads give.
    """

    q: Linear
    k: Linear
    q_norm: Array
    k_norm: RmsNorm
    pool: Convolution
    rope: Array
    sizes: PooledIndexer
    gate: OutputGate

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]; keys, values and index keys of all rows are written to `cache`."""
        kv, raw, keys = cache
        qkv = own_rows(ops, layer, h, batch, cache)
        paged = batch.cu_q, batch.context, batch.block_tables
        q = ops.rope_queries(
            self.q(ops, h), batch.positions, layer.rope, 0, self.sizes.head_dim, self.q_norm, self.k_norm.eps
        )
        k = self.k_norm(ops, ops.causal_conv(self.k(ops, h), raw, batch.slots, paged, self.pool))
        turned = ops.take_columns(k, 0, self.sizes.head_dim)  # the op turns queries too, which lie elsewhere
        ops.index_rope_and_cache(turned, k, batch.positions, self.rope, batch.slots, keys, 1)
        tables, contexts, ends = ops.choose_pooled(q, keys, *paged, self.sizes)
        found = ops.attention(qkv, kv, ends, contexts, tables, layer.attend)
        return layer.o(ops, chosen(ops, self.gate(ops, found, self.gate.matrix(ops, h)), wanted))
