"""The flat arrays of one step, always handed on as an argument."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """T rows of S sequences.

    tokens, positions [T] int32; slots [T] int64 (block * block_size + offset in the cache); cu_q [S + 1] int32: rows
    cu_q[s]..cu_q[s + 1] belong to sequence s; context [S] int32: tokens in the cache once these rows are written;
    block_tables [S, max_blocks] int32; logit_rows [R] int32: rows that want logits;
    tree [T] int64: ancestors of the rows of a branching draft, as `ops.attention` reads them, or None.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    cu_q: Tensor
    context: Tensor
    block_tables: Tensor
    logit_rows: Tensor
    tree: Tensor | None = None
