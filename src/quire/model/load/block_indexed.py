"""Attention to chosen blocks, from what the checkpoint holds."""

from __future__ import annotations

from quire.model.load.reader import WeightReader
from quire.model.net.block_indexed import BlockSparseAttention
from quire.model.net.parts import NormSpans, RmsNorm
from quire.ops.arrays import concat


def load_block_indexed(reader: WeightReader, index: int) -> BlockSparseAttention:
    """Attention of layer `index`, packed, with its indexer."""
    spec, eps = reader.local, reader.opened.spec.norm_eps
    q_norm, k_norm = reader.vector("block_index_q_norm", index), reader.vector("block_index_k_norm", index)
    assert q_norm is not None and k_norm is not None, "the family requires both"
    return BlockSparseAttention(
        reader.linear(("block_index_q",), index),
        reader.linear(("block_index_k",), index),
        NormSpans(concat([q_norm] * spec.kv_heads), 0, spec.blocks.head_dim, False, eps),
        RmsNorm(k_norm, eps),
        spec.blocks,
    )
