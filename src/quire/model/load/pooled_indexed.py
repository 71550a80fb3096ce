"""Attention to blocks that an indexer with keys of blocks chooses, from what the checkpoint holds."""

from __future__ import annotations

import numpy as np

from quire.core.dtypes import F32
from quire.model.load.placement import Unplaced
from quire.model.load.reader import WeightReader
from quire.model.net.gated_attention import OutputGate
from quire.model.net.parts import RmsNorm
from quire.model.net.pooled_indexed import PooledSparseAttention
from quire.ops.arrays import concat
from quire.ops.convolution import Convolution


def load_pooled_indexed(reader: WeightReader, index: int, rope: Unplaced, gate: OutputGate) -> PooledSparseAttention:
    """Attention of layer `index`, packed, with its indexer; `gate`: of what its heads give."""
    sizes, eps = reader.local.pooled, reader.opened.spec.norm_eps
    q_norm, k_norm = reader.vector("pooled_index_q_norm", index), reader.vector("pooled_index_k_norm", index)
    assert q_norm is not None and k_norm is not None, "the family requires both"
    return PooledSparseAttention(
        reader.linear(("pooled_index_q",), index),
        reader.linear(("pooled_index_k",), index),
        q_norm,
        RmsNorm(k_norm, eps),
        Convolution(np.full((sizes.size, sizes.head_dim), 1 / sizes.size, F32)),
        reader.once("rope of blocks", lambda: _behind(reader, rope, sizes.size - 1)),
        sizes,
        gate,
    )


def _behind(reader: WeightReader, rope: Unplaced, tokens: int) -> Unplaced:
    """The table `rope` whose rows are those of `tokens` earlier positions."""
    moved = concat([rope[:1]] * min(tokens, len(rope)) + [rope[: max(0, len(rope) - tokens)]])
    reader.count("rope", "f32", moved.nbytes)
    return moved
