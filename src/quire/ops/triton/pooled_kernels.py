"""Indexers with a key for each block of tokens on the GPU: the scores of blocks, and the best of them."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.indexer_kernels import last_picked, picked, products, seen_by


@triton.jit(do_not_specialize=["first", "sequences", "parts"])
def pooled_scores_kernel(scores, q, keys, cu_q, context, tables, first, sequences, parts, most, span, table_step,
                         block_step, HEADS: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
                         SIZE: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Scores of the whole blocks of WIDTH tokens up to each row's own, where these are more than `most`.
    Grid: (rows from `first` on, parts)."""
    row = (first + tl.program_id(0)).to(tl.int64)
    s, seen = seen_by(row, cu_q, context, sequences)
    head, d = tl.arange(0, BH), tl.arange(0, BD)
    at = q + row * (HEADS * D) + head[:, None] * D + d[None, :]
    x = tl.load(at, mask=(head < HEADS)[:, None] & (d < D)[None, :], other=0.0).to(DOT)
    table = tables + s.to(tl.int64) * table_step
    out = scores + tl.program_id(0).to(tl.int64) * span
    blocks = seen // WIDTH
    if blocks <= most:
        blocks = 0
    for begin in range(tl.program_id(1) * BN, blocks, parts * BN):
        found = products(x, keys, table, begin, blocks, block_step, D, BD, SIZE, BN, DOT, WIDTH)
        block = begin + tl.arange(0, BN)
        tl.store(out + block, tl.sum(tl.maximum(found, 0.0), 0), mask=block < blocks)


@triton.jit(do_not_specialize=["first", "sequences"])
def pick_pooled_kernel(out, contexts, scores, cu_q, context, tables, first, sequences, most, span, table_step,
                       SIZE: tl.constexpr, WIDTH: tl.constexpr, PER: tl.constexpr, BP: tl.constexpr,
                       BLOCK: tl.constexpr):  # fmt: skip
    """Blocks of the cache of the best `most` whole blocks of each row, ascending, those with the tokens behind the last
    whole one, and -1 behind them; how many tokens they hold. Grid: (rows from `first` on)."""
    row = (first + tl.program_id(0)).to(tl.int64)
    s, seen = seen_by(row, cu_q, context, sequences)
    blocks = seen // WIDTH
    own = scores + tl.program_id(0).to(tl.int64) * span
    chosen = out + row * ((most + 1) * PER)
    table = tables + s.to(tl.int64) * table_step
    last, left = last_picked(own, blocks, most, BLOCK)
    taken, equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    part = tl.arange(0, BP)
    for begin in range(0, blocks, BLOCK):
        one, equal = picked(own, begin, blocks, last, left, equal, BLOCK)
        place = taken + tl.cumsum(one.to(tl.int32), 0) - 1
        at = (begin + tl.arange(0, BLOCK))[:, None] * PER + part[None, :]
        inside = one[:, None] & (part < PER)[None, :]
        found = tl.load(table + at, mask=inside, other=0)
        tl.store(chosen + place[:, None] * PER + part[None, :], found, mask=inside)
        taken += tl.sum(one.to(tl.int32), 0)
    rest = seen - blocks * WIDTH
    behind = part < tl.cdiv(rest, SIZE)
    tl.store(chosen + taken * PER + part, tl.load(table + blocks * PER + part, mask=behind, other=0), mask=behind)
    tl.store(contexts + row, taken * WIDTH + rest)
    entries = taken * PER + tl.cdiv(rest, SIZE)
    for begin in range(0, (most + 1) * PER, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(chosen + at, tl.full([BLOCK], -1, tl.int32), mask=(at >= entries) & (at < (most + 1) * PER))
