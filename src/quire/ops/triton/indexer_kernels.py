"""Indexers of sparse attention on the GPU: their rotation, the scores of tokens and of blocks, and the best of them.

Scores of a row are computed by programs of that row alone, and lie in memory until the best are picked: their order as
integers is that of the numbers, and the last one that is picked is found byte by byte, from the highest on (radix
select, Alabi et al. 2012). Counts and positions are whole numbers, so no bit depends on how the work is divided.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.cache_kernels import load_heads, store_heads, turn
from quire.ops.triton.interpreter import repair

repair()


@triton.jit
def index_rope_kernel(q, k, positions, table, slots, keys, block_step, HEADS: tl.constexpr, D: tl.constexpr,
                      HALF: tl.constexpr, HB: tl.constexpr, RB: tl.constexpr, SIZE: tl.constexpr,
                      BH: tl.constexpr):  # fmt: skip
    """Queries turned in place, keys stored turned; nothing at a negative slot. Grid: (rows, tiles of BH heads + 1)."""
    t = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (HEADS + BH - 1) // BH
    number = tl.program_id(1)
    position = tl.load(positions + t)
    if number < tiles:
        head = number * BH + tl.arange(0, BH)
        at = q + t * (HEADS * D) + head * D
        a, b, c, paired, left = load_heads(at, None, 0.0, head < HEADS, D, HALF, HB, RB)
        tl.debug_barrier()
        a, b = turn(a, b, table, position, HALF, HB)
        store_heads(at, a, b, c, paired, left, HALF, HB, RB)
    else:
        slot = tl.load(slots + t)
        one = tl.zeros([1], tl.int32) == 0
        first, second, rest, pairs, others = load_heads(
            k + t * D + tl.zeros([1], tl.int64), None, 0.0, one, D, HALF, HB, RB
        )
        first, second = turn(first, second, table, position, HALF, HB)
        to = keys + slot // SIZE * block_step + slot % SIZE * D + tl.zeros([1], tl.int64)
        store_heads(to, first, second, rest, pairs & (slot >= 0), others & (slot >= 0), HALF, HB, RB)


@triton.jit
def sequence_at(row, cu_q, sequences):
    """The sequence of a row of the batch, the last one for rows behind them all."""
    low, high = sequences * 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        here = tl.load(cu_q + middle) <= row
        low = tl.where(here, middle, low)
        high = tl.where(here, high, middle)
    return low


@triton.jit
def seen_by(row, cu_q, context, sequences):
    """The sequence of a row, and the tokens up to its own; 0 for a row of no sequence."""
    s = sequence_at(row, cu_q, sequences)
    end = tl.load(cu_q + s + 1)
    return s, tl.where(row < end, tl.load(context + s) - end + row.to(tl.int32) + 1, 0)


@triton.jit
def products(x, keys, table, at, seen, block_step, D: tl.constexpr, BD: tl.constexpr, SIZE: tl.constexpr,
             BN: tl.constexpr, DOT: tl.constexpr, WIDTH: tl.constexpr = 1,
             STEP: tl.constexpr = 0):  # fmt: skip
    """Queries x [BH, BD] times the keys of tokens at..at + BN, or of the last ones of blocks of WIDTH tokens, f32
    [BH, BN]; 0 where none is `seen`. A key is the first of STEP numbers that the cache has of a token, 0: of D."""
    place, d = at + tl.arange(0, BN), tl.arange(0, BD)
    inside, token = place < seen, place * WIDTH + WIDTH - 1
    block = tl.load(table + token // SIZE, mask=inside, other=0)
    where = block.to(tl.int64) * block_step + token % SIZE * (STEP if STEP > 0 else D)
    k = tl.load(keys + where[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0).to(DOT)
    return tl.dot(x, tl.trans(k), input_precision="ieee")


@triton.jit(do_not_specialize=["first", "sequences", "parts"])
def token_scores_kernel(scores, q, weights, keys, cu_q, context, tables, first, sequences, parts, most, span,
                        table_step, block_step, HEADS: tl.constexpr, BH: tl.constexpr, D: tl.constexpr,
                        BD: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr,
                        STEP: tl.constexpr, POOL: tl.constexpr):  # fmt: skip
    """Scores of the pools of POOL tokens up to each row's own, where these are more than `most`. Grid: (rows from
    `first` on, parts).

    A program takes every `parts`-th tile of its row's pools. The cache has STEP numbers of a token.
    """
    row = (first + tl.program_id(0)).to(tl.int64)
    s, seen = seen_by(row, cu_q, context, sequences)
    head, d = tl.arange(0, BH), tl.arange(0, BD)
    real = head < HEADS
    at = q + row * (HEADS * D) + head[:, None] * D + d[None, :]
    x = tl.load(at, mask=real[:, None] & (d < D)[None, :], other=0.0).to(DOT)
    factor = tl.load(weights + row * HEADS + head, mask=real, other=0.0).to(tl.float32)
    table = tables + s.to(tl.int64) * table_step
    out = scores + tl.program_id(0).to(tl.int64) * span
    seen = seen // POOL
    if seen <= most:
        seen = 0
    for begin in range(tl.program_id(1) * BN, seen, parts * BN):
        found = products(x, keys, table, begin, seen, block_step, D, BD, SIZE, BN, DOT, POOL, STEP)
        token = begin + tl.arange(0, BN)
        tl.store(out + token, tl.sum(tl.maximum(found, 0.0) * factor[:, None], 0), mask=token < seen)


@triton.jit(do_not_specialize=["first", "sequences", "parts"])
def block_scores_kernel(scores, q, keys, cu_q, context, tables, first, sequences, parts, most, local, span, table_step,
                        block_step, HEADS: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
                        SIZE: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Scores of blocks of WIDTH tokens up to each row's own, for each head: that of the best token, and inf of the
    last `local` blocks. Grid: (rows from `first` on, parts); rows of no more than `most` blocks have none."""
    row = (first + tl.program_id(0)).to(tl.int64)
    s, seen = seen_by(row, cu_q, context, sequences)
    head, d = tl.arange(0, BH), tl.arange(0, BD)
    real = head < HEADS
    at = q + row * (HEADS * D) + head[:, None] * D + d[None, :]
    x = tl.load(at, mask=real[:, None] & (d < D)[None, :], other=0.0).to(DOT)
    table = tables + s.to(tl.int64) * table_step
    out = scores + (tl.program_id(0).to(tl.int64) * HEADS + head) * span
    blocks = tl.cdiv(seen, WIDTH)
    if blocks <= most:
        blocks = 0
    for block in range(tl.program_id(1), blocks, parts):
        best = tl.full([BH], float("-inf"), tl.float32)
        end = tl.minimum((block + 1) * WIDTH, seen)
        for begin in range(block * WIDTH, end, BN):
            found = products(x, keys, table, begin, end, block_step, D, BD, SIZE, BN, DOT)
            inside = begin + tl.arange(0, BN) < end
            best = tl.maximum(best, tl.max(tl.where(inside[None, :], found, float("-inf")), 1))
        best = tl.where(block >= blocks - local, float("inf"), best)
        tl.store(out + block, best, mask=real)


@triton.jit
def ordered(x):
    """Numbers as uint32 of the same order, in which both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    whole = bits.to(tl.uint32, bitcast=True)
    return tl.where(bits < 0, whole ^ 0xFFFFFFFF, whole | 0x80000000)


@triton.jit
def last_picked(scores, count, most, BLOCK: tl.constexpr):
    """The `most`-th of the `count` scores from the highest on, as `ordered` has it, and how many equal to it are among
    the first `most`; whatever is picked where there are no more than `most`."""
    last = tl.zeros([], tl.uint32)
    left = tl.zeros([], tl.int32) + most
    digits = tl.arange(0, 256)
    if count > most:
        for step in tl.static_range(4):
            counts = tl.zeros([256], tl.int32)
            for begin in range(0, count, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                key = ordered(tl.load(scores + at, mask=at < count, other=0.0))
                like = at < count
                if step > 0:
                    like = like & ((key >> (32 - 8 * step)) == (last >> (32 - 8 * step)))
                counts += tl.histogram(((key >> (24 - 8 * step)) & 255).to(tl.int32), 256, mask=like)
            not_below = tl.cumsum(counts, 0, reverse=True)
            digit = tl.sum((not_below >= left).to(tl.int32), 0) - 1
            left = left - tl.sum(tl.where(digits == digit + 1, not_below, 0), 0)
            last = last | (digit.to(tl.uint32) << (24 - 8 * step))
    return last, left


@triton.jit
def picked(scores, begin, count, last, left, equal, BLOCK: tl.constexpr):
    """Whether each of scores begin..begin + BLOCK is picked, where `equal` of those that equal the last were before."""
    at = begin + tl.arange(0, BLOCK)
    key = ordered(tl.load(scores + at, mask=at < count, other=0.0))
    same = ((at < count) & (key == last)).to(tl.int32)
    before = equal + tl.cumsum(same, 0) - same
    return (at < count) & ((key > last) | ((same != 0) & (before < left))), equal + tl.sum(same, 0)


@triton.jit(do_not_specialize=["first", "sequences"])
def pick_tokens_kernel(out, scores, cu_q, context, first, sequences, most, span, POOL: tl.constexpr, BP: tl.constexpr,
                       BLOCK: tl.constexpr):  # fmt: skip
    """Positions of the tokens of the best `most` pools of each row and of those behind its last whole pool, ascending,
    and -1 behind them. Grid: (rows from `first` on)."""
    row = (first + tl.program_id(0)).to(tl.int64)
    _, seen = seen_by(row, cu_q, context, sequences)
    pools, width = seen // POOL, most * POOL + POOL - 1
    own = scores + tl.program_id(0).to(tl.int64) * span
    chosen = out + row * width
    last, left = last_picked(own, pools, most, BLOCK)
    taken, equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    part = tl.arange(0, BP)
    for begin in range(0, pools, BLOCK):
        one, equal = picked(own, begin, pools, last, left, equal, BLOCK)
        place = taken + tl.cumsum(one.to(tl.int32), 0) - 1
        at = (begin + tl.arange(0, BLOCK))[:, None] * POOL + part[None, :]
        tl.store(chosen + place[:, None] * POOL + part[None, :], at, mask=one[:, None] & (part < POOL)[None, :])
        taken += tl.sum(one.to(tl.int32), 0)
    behind = seen - pools * POOL
    tl.store(chosen + taken * POOL + part, pools * POOL + part, mask=part < behind)
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(chosen + at, tl.full([BLOCK], -1, tl.int32), mask=(at >= taken * POOL + behind) & (at < width))


@triton.jit(do_not_specialize=["first", "sequences", "rows"])
def pick_blocks_kernel(out, contexts, scores, cu_q, context, tables, first, sequences, rows, most, span, table_step,
                       HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PER: tl.constexpr,
                       BP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Blocks of the cache of the best `most` blocks of each row and head, ascending, and -1 behind them; the tokens
    in them up to the row's own. Grid: (rows from `first` on, heads)."""
    row, head = (first + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    s, seen = seen_by(row, cu_q, context, sequences)
    blocks, held = tl.cdiv(seen, WIDTH), tl.cdiv(seen, SIZE)
    own = scores + (tl.program_id(0).to(tl.int64) * HEADS + head) * span
    chosen = out + (head.to(tl.int64) * rows + row) * (most * PER)
    table = tables + s.to(tl.int64) * table_step
    last, left = last_picked(own, blocks, most, BLOCK)
    taken, equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    part = tl.arange(0, BP)
    for begin in range(0, blocks, BLOCK):
        one, equal = picked(own, begin, blocks, last, left, equal, BLOCK)
        place = taken + tl.cumsum(one.to(tl.int32), 0) - 1
        at = (begin + tl.arange(0, BLOCK))[:, None] * PER + part[None, :]
        inside = one[:, None] & (part < PER)[None, :] & (at < held)
        found = tl.load(table + at, mask=inside, other=0)
        tl.store(chosen + place[:, None] * PER + part[None, :], found, mask=inside)
        taken += tl.sum(one.to(tl.int32), 0)
    # The row's own block is the last one, of which the cache may hold a part.
    tl.store(contexts + head.to(tl.int64) * rows + row, seen - (blocks - taken) * WIDTH)
    entries = held - (blocks - taken) * PER
    for begin in range(0, most * PER, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(chosen + at, tl.full([BLOCK], -1, tl.int32), mask=(at >= entries) & (at < most * PER))
