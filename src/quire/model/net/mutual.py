"""Attention in which rows of one picture see each other (Gemma Team 2025, Gemma 3; prefix-LM, Raffel et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.model.batch import Batch
from quire.model.net.decoder import Layer, Wanted, chosen, own_rows
from quire.ops.arrays import Array, cast_to, dtype_of
from quire.ops.backend import Ops
from quire.ops.layout import KVCache


def put(ops: Ops, x: Any, rows: NDArray[np.int64], values: Any, add: bool = False) -> None:
    """x[rows] = values, or += them, in place and in the dtype of `x`; each row once."""
    values = cast_to(ops.put(values), dtype_of(x))
    x[rows] = x[rows] + values if add else values


@dataclass(frozen=True)
class Mutual:
    """A step as attention sees it: each row of a picture is a sequence of one row, as if it were the last of its run,
    and what lies between is one of its own.

    `cu_q` [P + 1], `context` [P] int32, as of a batch of these P; `owners` [P] int64: the sequences whose blocks they
    have. Of the rows of pictures: `rows` [n] int64 in the step, `parts` [n] among the P, `places` [n] in the prompt,
    `ends` [n] of their runs there.
    """

    cu_q: NDArray[np.int32]
    context: NDArray[np.int32]
    owners: NDArray[np.int64]
    rows: NDArray[np.int64]
    parts: NDArray[np.int64]
    places: NDArray[np.int64]
    ends: NDArray[np.int64]

    def farther(self, window: int) -> list[tuple[int, NDArray[np.int64]]]:
        """(how far back a row sees from the end of its run, which of the n) where that is not `window`.

        A row sees `window` tokens back from its own place, and on to the end of its run: from there it is more.
        """
        back = self.ends - np.maximum(0, self.places - window + 1)
        other = np.flatnonzero((self.ends > window) & (back != window))
        return [(int(seen), other[back[other] == seen]) for seen in np.unique(back[other])]


def divided(
    cu_q: NDArray[np.int32],
    context: NDArray[np.int32],
    rows: NDArray[np.int64],
    places: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> Mutual:
    """`Mutual` of a step of sequences `cu_q` and `context`; `rows`, `places` and `ends` of its rows of pictures."""
    starts = np.zeros(int(cu_q[-1]) + 1, bool)
    starts[cu_q] = starts[rows] = starts[rows + 1] = True
    bounds = np.flatnonzero(starts)
    firsts, lasts = bounds[:-1], bounds[1:]
    owners = np.searchsorted(cu_q, firsts, side="right") - 1
    seen = context[owners] - (cu_q[owners + 1] - lasts)
    parts = np.searchsorted(firsts, rows)
    seen[parts] = ends
    return Mutual(bounds.astype(np.int32), seen.astype(np.int32), owners.astype(np.int64), rows, parts, places, ends)


@dataclass(frozen=True)
class MutualAttention:
    """`own_attention` of a step with rows of pictures. `tables`: what was made of the batch's, by group of layers."""

    mutual: Mutual
    tables: dict[int, tuple[Array, Array, Array]]

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: KVCache, wanted: Wanted) -> Array:
        """As `own_attention`."""
        qkv, spec, mutual = own_rows(ops, layer, h, batch, cache), layer.attend, self.mutual
        cu_q, context, tables = self._paged(ops, batch)
        attended = ops.attention(qkv, cache, cu_q, context, tables, spec, batch.tree)
        for seen, which in mutual.farther(spec.window) if spec.window else ():
            rows, parts = mutual.rows[which], mutual.parts[which]
            queries = ops.pick_rows(qkv, ops.put(rows.astype(np.int32)))
            each = ops.put(np.arange(len(rows) + 1, dtype=np.int32))
            far = replace(spec, window=seen)
            put(ops, attended, rows, ops.attention(queries, cache, each, context[parts], tables[parts], far))
        return layer.o(ops, chosen(ops, attended, wanted))

    def _paged(self, ops: Ops, batch: Batch) -> tuple[Array, Array, Array]:
        """cu_q, context and block tables of the sequences of `mutual`."""
        found = self.tables.get(id(batch.block_tables))
        if found is None:
            cu_q, context = ops.put(self.mutual.cu_q), ops.put(self.mutual.context)
            found = self.tables[id(batch.block_tables)] = cu_q, context, batch.block_tables[self.mutual.owners]
        return found
