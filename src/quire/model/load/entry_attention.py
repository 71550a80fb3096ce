"""Attention to the last tokens and to entries, from what the checkpoint holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32
from quire.model.load.placement import Unplaced
from quire.model.load.reader import WeightReader
from quire.model.mixers.entry_attention import turned_first
from quire.model.net.entry_attention import EntryAttention, EntryIndexer, MadeEntries
from quire.model.net.latent import LowRankQuery
from quire.model.net.parts import Linear, NormSpans, RmsNorm
from quire.ops.arrays import cast_to
from quire.ops.entries import Pool
from quire.ops.experts import padded_rows
from quire.ops.weights import Packed, Weight
from quire.quant.base import float_kind


def load_entry_attention(reader: WeightReader, index: int, rope: Unplaced) -> tuple[Linear, EntryAttention]:
    """What makes the key of a row of layer `index`, and its attention. `rope`: the table of its positions."""
    spec, sizes = reader.local, reader.local.entries
    d, eps = spec.head_dim, spec.norm_eps
    order, heads = turned_first(1, d, sizes.turned), turned_first(spec.heads, d, sizes.turned)
    query = LowRankQuery(
        reader.linear(("entry_q_a",), index), _norm(reader, "entry_q_a_norm", index),
        reader.linear(("entry_q_b",), index, heads),
    )  # fmt: skip
    made = indexer = None
    if sizes.every[index]:
        made = _made(reader, "paired" if sizes.pairs[index] else "entry", index, d, rope)
    if sizes.pairs[index]:
        rows = turned_first(sizes.index_heads, sizes.index_dim, sizes.turned)
        indexer = EntryIndexer(
            reader.linear(("entry_index_q",), index, rows),
            reader.dense("entry_index_weights", index),
            _made(reader, "entry_index", index, sizes.index_dim, rope),
            sizes.index_dim,
            sizes.most,
        )
    back = reader.once(f"rope back {spec.rope[index]!r}", lambda: _turned_back(reader, rope))
    return reader.linear(("entry_k",), index, order), EntryAttention(
        query,
        NormSpans(np.ones(spec.heads * d, F32), 0, d, False, eps),
        _norm(reader, "entry_k_norm", index, order),
        back,
        _grouped_results(reader, index, heads),
        sizes.groups,
        sizes.o_rank,
        sizes.window,
        made,
        indexer,
    )


def _norm(reader: WeightReader, role: str, index: int, order: NDArray[np.int64] | None = None) -> RmsNorm:
    weight = reader.vector(role, index)
    assert weight is not None, "the family requires it"
    return RmsNorm(weight if order is None else weight[order], reader.local.norm_eps)


def _made(reader: WeightReader, prefix: str, index: int, width: int, rope: Unplaced) -> MadeEntries:
    """What makes entries of `width` numbers of rows of layer `index`."""
    series = 1 + reader.local.entries.pairs[index]
    order = turned_first(series, width, reader.local.entries.turned)
    bias, norm = reader.vector(f"{prefix}_bias", index), _norm(reader, f"{prefix}_norm", index, order[:width])
    assert bias is not None, "the family requires it"
    return MadeEntries(
        reader.linear((f"{prefix}_numbers",), index, order),
        reader.linear((f"{prefix}_gates",), index, order),
        Pool(np.ascontiguousarray(bias[:, order]), norm.weight, norm.eps, rope, series),
    )


def _turned_back(reader: WeightReader, rope: Unplaced) -> Unplaced:
    """The table of `rope` with angles the other way."""
    table: Unplaced = reader.ops.host(rope).copy()
    table[:, 1] *= -1
    reader.count("rope", "f32", table.nbytes)
    return table


def _grouped_results(reader: WeightReader, index: int, heads: NDArray[np.int64]) -> Packed:
    """The matrices of groups of heads below each other, whose columns are in the order of our heads' numbers."""
    sizes = reader.local.entries
    width = len(heads) // sizes.groups
    rows = padded_rows(sizes.o_rank)
    name = f"{index}.entry_o_a"
    kept = reader.cache.get(name, sizes.groups * len(rows), width) if reader.cache is not None else None
    if kept is not None:
        packed = kept.packed
    else:
        numbers = reader.matrix(("entry_o_a",), index)[0].dequantize()[:, heads[:width]]
        dtype = reader.ops.head_dtype(reader.form.dtype)
        each = numbers.reshape(sizes.groups, sizes.o_rank, width)[:, rows].reshape(-1, width)
        packed = reader.ops.pack(Weight(float_kind(dtype), cast_to(each, dtype)))
        if reader.cache is not None:
            reader.cache.put(name, packed, None)
    reader.count("entry_o_a", packed.kind, packed.nbytes)
    return packed
