"""Paged attention of chunks of prompts on the GPU: a program for each tile of rows (FlashAttention-2, Dao 2023).

The sums are those of `attention_kernels`, split for split, with both halves of the fold in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.attention_kernels import first_seen, fold, root_of, tile_of_keys, tile_of_rows, with_sink


@triton.jit
def sequence_of(tile, cu_q, sequences, TOKENS: tl.constexpr):
    """The sequence of a tile of rows, and the tile's number in it, where sequence s begins at cu_q[s] / TOKENS + s."""
    low, high = sequences * 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        here = tl.load(cu_q + middle) // TOKENS + middle <= tile
        low = tl.where(here, middle, low)
        high = tl.where(here, high, middle)
    return low, tile - (tl.load(cu_q + low) // TOKENS + low)


@triton.jit
def walk(begin, end, queries, total_m, total_e, total, m, e, acc, kv, sight, score, tree, D: tl.constexpr,
         BD: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr,
         SPEC: tl.constexpr, DOT: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Tiles begin..end of keys; what was summed since the last end of a split is folded at each."""
    for tile in range(begin, end):
        m, e, acc = tile_of_keys(
            tile * BN, queries, m, e, acc, kv, sight, score, tree, D, BD, SIZE, BN, R, SPEC, DOT, KIND, MASKED
        )
        if (tile + 1) % (SPLIT // BN) == 0:
            total_m, total_e, before, after = fold(total_m, total_e, m, e)
            total = tl.fma(acc, tl.broadcast_to(after[:, None], acc.shape), total * before[:, None])
            m = tl.full(m.shape, float("-inf"), tl.float32)
            e = tl.zeros_like(e)
            acc = tl.zeros_like(acc)
    return total_m, total_e, total, m, e, acc


@triton.jit
def every_key(queries, kv, sight, score, one, first_position, D: tl.constexpr, BD: tl.constexpr, SIZE: tl.constexpr,
              BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr, SPEC: tl.constexpr,
              DOT: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Maximum, sum and sum over values of a tile of rows; tiles of keys that all rows see are not masked."""
    _, _, low, high = sight
    _, _, _, _, window = score
    m = tl.full([BM], float("-inf"), tl.float32)
    e = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    total_m, total_e, total = m, e, acc
    # from tile `every` on some row does not see all keys
    seen, every = low // BN, (tl.minimum(first_position + SPEC[5], high - 1) + 1) // BN
    if SPEC[0]:
        seen = tl.minimum(tl.cdiv(first_seen(high - 1, window, SPEC), BN), every)
        total_m, total_e, total, m, e, acc = walk(
            low // BN, seen, queries, total_m, total_e, total, m, e, acc, kv, sight, score, one, D, BD, SIZE, BN, R,
            SPLIT, SPEC, DOT, KIND, True)  # fmt: skip
    total_m, total_e, total, m, e, acc = walk(
        seen, every, queries, total_m, total_e, total, m, e, acc, kv, sight, score, one, D, BD, SIZE, BN, R, SPLIT,
        SPEC, DOT, KIND, False)  # fmt: skip
    total_m, total_e, total, m, e, acc = walk(
        every, tl.cdiv(high, BN), queries, total_m, total_e, total, m, e, acc, kv, sight, score, one, D, BD, SIZE,
        BN, R, SPLIT, SPEC, DOT, KIND, True)  # fmt: skip
    total_m, total_e, before, after = fold(total_m, total_e, m, e)
    total = tl.fma(acc, tl.broadcast_to(after[:, None], acc.shape), total * before[:, None])
    return total_m, total_e, total


@triton.jit(do_not_specialize=["sequences"])
def chunk_kernel(out, qkv, rotated, keys, values, key_scales, value_scales, cu_q, context, tables, slopes, bias, sinks,
                 tree, factor, cap, window, row_step, rotated_step, rotated_width, table_step, block_step, key_step,
                 head_step, heads, sequences, D: tl.constexpr, BD: tl.constexpr, SIZE: tl.constexpr,
                 GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
                 SPLIT: tl.constexpr, SPEC: tl.constexpr, DOT: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Attention of sequences of more than one row. Grid: (tiles of rows, tiles of heads).

    There are at most T / tokens of a tile + S tiles of rows; late ones have the most keys and are started first.
    """
    tiles: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    TOKENS: tl.constexpr = BM // TILE_HEADS
    s, number = sequence_of(tl.num_programs(0) - 1 - tl.program_id(0), cu_q, sequences, TOKENS)
    begin = tl.load(cu_q + s)
    n = tl.load(cu_q + s + 1) - begin
    length = tl.load(context + s)
    kv_head = tl.program_id(1) // tiles
    head = kv_head * GROUP + tl.program_id(1) % tiles * TILE_HEADS
    kv = (keys, values, key_scales, value_scales, tables + s.to(tl.int64) * table_step, block_step,
          key_step, kv_head.to(tl.int64) * head_step)  # fmt: skip
    root = root_of(begin, n, length, tree, SPEC)
    d = tl.arange(0, BD)
    start, stop, step = number * TOKENS, tl.minimum((number + 1) * TOKENS, n), TOKENS
    if SPEC[3] and root < length:
        step = 1
    if n == 1:
        stop = start
    for first in range(start, stop, step):
        where, queries, of_row, sight, first_position, one = tile_of_rows(
            (qkv, rotated, slopes, tree, window), (row_step, rotated_step, rotated_width), begin, n, length, first,
            step, root, head, (kv_head + 1) * GROUP - head, D, BD, TILE_HEADS, BM, R, SPEC, DOT)  # fmt: skip
        row, at_head, real = where
        score = (factor, cap, bias, of_row, window)
        total_m, total_e, total = every_key(queries, kv, sight, score, one, first_position, D, BD, SIZE, BM, BN, R,
                                            SPLIT, SPEC, DOT, KIND)  # fmt: skip
        if sinks is not None:
            total_e, before = with_sink(total_m, total_e, tl.load(sinks + at_head, mask=real, other=0.0))
            total = total * before[:, None]
        at = out + (row[:, None] * heads + at_head[:, None]) * D + d[None, :]
        tl.store(at, total / total_e[:, None], mask=real[:, None] & (d < D)[None, :])
