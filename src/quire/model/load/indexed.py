"""Latent attention to chosen tokens, from what the checkpoint holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.model.load.latent import halves, load_latent
from quire.model.load.reader import WeightReader
from quire.model.net.gated_attention import NumberGate, OutputGate
from quire.model.net.indexed import (
    FollowingAttention,
    IndexedAttention,
    LastChoice,
    OfFirst,
    PooledTokenIndexer,
    TokenIndexer,
)
from quire.model.net.latent import LowRankQuery, WideQuery
from quire.model.net.parts import LayerNorm, Linear


def load_indexed(
    reader: WeightReader, index: int, gate: OutputGate | None
) -> tuple[Linear, IndexedAttention | FollowingAttention]:
    """`qkv` and attention of layer `index`, packed, with the layer's own indexer if it has one. `gate`: of the rows."""
    down, attention = load_latent(reader, index)
    attention = replace(attention, pool=reader.opened.spec.mla.indexer.pool)
    last = reader.once("last choice", LastChoice)
    if not reader.opened.spec.at(index).mla.indexer.at(index):
        return down, FollowingAttention(attention, last, gate)
    assert isinstance(attention.query, LowRankQuery), "families with indexers have queries by way of a smaller space"
    indexer, wide = _indexer(reader, index), isinstance(attention.query, WideQuery)
    if wide:
        gate = NumberGate(reader.linear(("latent_gate",), index))
        indexer = replace(indexer, q=OfFirst(indexer.q, reader.opened.spec.mla.q_rank))
    return down, IndexedAttention(attention, attention.query, indexer, last, gate, wide)


def _indexer(reader: WeightReader, index: int) -> TokenIndexer:
    sizes = reader.opened.spec.mla.indexer
    turn = _order(reader)
    rows = (np.arange(sizes.heads, dtype=np.int64)[:, None] * sizes.head_dim + turn).flatten()
    weight, bias = (reader.vector("index_k_norm", index, part) for part in ("weight", "bias"))
    assert weight is not None and bias is not None, "the family requires both"
    parts = (
        reader.linear(("index_q",), index, rows),
        reader.linear(("index_k",), index, turn),
        LayerNorm(weight[turn], bias[turn], sizes.eps),
        reader.dense("index_weights", index),
        sizes.heads,
        sizes.choice,
    )
    if sizes.pool == 1:
        return TokenIndexer(*parts)
    return PooledTokenIndexer(*parts, reader.linear(("index_gate",), index), reader.vector("index_bias", index))


def _order(reader: WeightReader) -> NDArray[np.int64]:
    """Where the numbers of a head lie on disk, of which pairs (i, i + rope / 2) turn here."""
    mla = reader.opened.spec.mla
    order = np.arange(mla.indexer.head_dim, dtype=np.int64)
    if mla.indexer.behind:
        order = np.roll(order, mla.rope)
    if mla.indexer.interleaved:
        order[: mla.rope] = order[halves(mla.rope)]
    return order
