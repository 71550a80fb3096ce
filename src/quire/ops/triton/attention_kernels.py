"""Paged attention on the GPU: one pass over tiles of keys, and what puts its parts together.

Every row walks its keys in tiles aligned to position 0, in splits of a fixed length aligned to position 0, each of
which begins from nothing (FlashDecoding, Dao et al. 2023); splits are folded into the result in ascending order. Who
does that differs - a program per split and then `merge_kernel` where few rows must fill the device, or one program for
all splits of a tile of rows (FlashAttention-2, Dao 2023) - and no bit depends on it: both go through `tile_of_keys` and
`fold` with the same tile sizes and number of warps, and a tile whose keys a row does not see changes nothing in it.
Products that are added are written as `fma` wherever a compiler could otherwise round once here and twice there.

Query heads that share a key head lie in one tile of rows with the tokens (GQA packing; FlashInfer, Ye et al. 2025): row
i of a tile is token i / TILE_HEADS, head i % TILE_HEADS of the group. Exponents are in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.interpreter import repair

repair()
PLAIN, INT8, FP8_BITS, FP8_NATIVE = (tl.constexpr(i) for i in range(4))
"""What a cache holds: numbers, or codes with a scale per token and head; e4m3 by integers or by the device."""
LOG2E = tl.constexpr(1.4426950408889634)
WINDOW, CHUNKED = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def widen(codes, KIND: tl.constexpr, DOT: tl.constexpr):
    """Cache elements as numbers of the type that is multiplied; every code of int8 and e4m3 is exact in bf16.

    e4m3 by integer operations: its 7 low bits moved to an f32's exponent and mantissa are the number times 2^-120.
    """
    if KIND == INT8:
        return codes.to(tl.int8, bitcast=True).to(tl.float32).to(DOT)
    if KIND == FP8_NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(DOT)
    if KIND == FP8_BITS:
        wide = codes.to(tl.int32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DOT)
    return codes.to(DOT)


@triton.jit
def tanh(x):
    """tanh: a series near 0, where the closed form loses its leading digits."""
    square = x * x
    near = x * (1.0 + square * (-0.33333333 + square * (0.13333333 + square * (-0.05396825 + square * 0.02186949))))
    return tl.where(tl.abs(x) < 0.25, near, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def popcount(mask):
    """Number of set bits of int64 masks, as int32."""
    x = mask.to(tl.uint64, bitcast=True)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    return ((x + (x >> 32)) & 0x7F).to(tl.int32)


@triton.jit
def ancestors(key, root, mask):
    """Where the token lies that has position `key` for a drafted row: from `root` on, the draft's tokens in `mask`."""
    bit = tl.arange(0, 64).to(tl.int64)
    one = tl.full([64], 1, tl.int64)
    rank = popcount(mask & ((one << bit) - 1))
    chosen = ((mask >> bit) & 1) != 0
    at = (key - root)[:, None] == rank[None, :]
    drafted = root + tl.sum(tl.where(at & chosen[None, :], tl.arange(0, 64)[None, :], 0), 1)
    return tl.where(key < root, key, drafted)


@triton.jit
def rows_of_cache(cache, scales, where, scale_at, seen, D: tl.constexpr, BD: tl.constexpr, DOT: tl.constexpr,
                  KIND: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Rows [BN, BD] of keys or values that begin at elements `where`, zeros where not `seen`, and their scales [BN]."""
    d = tl.arange(0, BD)
    at = cache + where[:, None] + d[None, :]
    if MASKED:
        codes = tl.load(at, mask=seen[:, None] & (d < D)[None, :], other=0)
    elif BD > D:
        codes = tl.load(at, mask=(d < D)[None, :], other=0)
    else:
        codes = tl.load(at)
    scale = where
    if KIND != PLAIN:
        scale = tl.load(scales + scale_at, mask=seen, other=0.0) if MASKED else tl.load(scales + scale_at)
    return widen(codes, KIND, DOT), scale


@triton.jit
def scores_of(x, key, sight, score, SPEC: tl.constexpr):
    """Products q.k [BM, BN] as scores; where nothing is done to them the factor is left to the exponent's fma.

    A distance is read from the bias of the row's head: one table is a few hundred bytes, which stay near.
    """
    position, _, _, _ = sight
    factor, cap, bias, of_row, _ = score
    slope, bias_at = of_row
    if SPEC[1]:
        x = tanh(x * factor)
        factor = cap
    if SPEC[4]:
        distance = tl.minimum(tl.maximum(position[:, None] - key[None, :] + SPEC[6], 0), SPEC[4] - 1)
        x = tl.fma(x, tl.zeros_like(x) + factor, tl.load(bias + (bias_at[:, None] + distance)))
    elif SPEC[1] or SPEC[2]:
        x = x * factor
    if SPEC[2]:
        distance = tl.abs(key[None, :] - position[:, None]).to(tl.float32)
        x = tl.fma(tl.broadcast_to(-slope[:, None], x.shape), distance, x)
    return x


@triton.jit
def update(x, values, value_scale, m, e, acc, exponent, DOT: tl.constexpr, KIND: tl.constexpr):
    """Add a tile to the running softmax (Milakov and Gimelshein 2018): scores x [BM, BN], values [BN, BD].

    `m`: the largest score so far times `exponent`, -inf if there was none; `e`: sum of exp2(x * exponent - m); `acc`:
    their sum over values.
    """
    new = tl.maximum(m, tl.max(x, 1) * exponent)
    base = tl.where(new == float("-inf"), 0.0, new)
    kept = tl.exp2(m - base)
    p = tl.exp2(tl.fma(x, tl.zeros_like(x) + exponent, tl.broadcast_to(-base[:, None], x.shape)))
    e = tl.fma(e, kept, tl.sum(p, 1))
    if KIND != PLAIN:
        p = p * value_scale[None, :]
    acc = tl.dot(p.to(DOT), values, acc * kept[:, None], input_precision="ieee")
    return new, e, acc


@triton.jit
def tile_of_keys(first, queries, m, e, acc, kv, sight, score, tree, D: tl.constexpr, BD: tl.constexpr,
                 SIZE: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, SPEC: tl.constexpr, DOT: tl.constexpr,
                 KIND: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The running softmax (m, e, acc) of rows after keys first..first + BN. queries = (q [BM, BD], q rotated).

    R > 0: latents (DeepSeek-AI 2024). They are the values and the first part of the keys; the rest of a key, R rotated
    numbers, is what `keys` holds, and the second queries [BM, power of two from R on] meet it.

    kv = (keys, values, key scales, value scales, the sequence's table, elements from one block to the next, those of
    the keys of latents, first element of the head).
    sight = (position [BM], last key seen [BM], first and last key + 1 that any row sees). score = (factor, cap, biases,
    (slopes [BM], places of the rows' heads in the biases [BM]), window). tree = (root, mask) of the one token of the
    tile. SPEC: `WINDOW`, `CHUNKED` or no window (0); which of cap, slopes, tree there are; distances of the bias;
    keys behind its own that a row sees, and distances of these.
    """
    keys, values, key_scales, value_scales, table, block_step, key_step, head_at = kv
    position, last, low, high = sight
    factor, _, _, _, window = score
    key = first + tl.arange(0, BN)
    stored = key
    if SPEC[3]:
        root, mask = tree
        if mask != 0:
            stored = ancestors(key, root, mask)
    seen = (key >= low) & (key < high)
    block = tl.load(table + stored // SIZE, mask=seen, other=0) if MASKED else tl.load(table + stored // SIZE)
    where = block.to(tl.int64) * block_step + head_at + stored % SIZE * D
    scale_at = (block.to(tl.int64) * block_step + head_at + SIZE * D) // 4 + stored % SIZE
    q, rotated = queries
    v, value_scale = rows_of_cache(values, value_scales, where, scale_at, seen, D, BD, DOT, KIND, MASKED)
    if R > 0:
        key_at = block.to(tl.int64) * key_step + stored % SIZE * R
        k, key_scale = rows_of_cache(keys, key_scales, key_at, scale_at, seen, R, rotated.shape[1], DOT, KIND, MASKED)
        x = tl.dot(q, tl.trans(v), input_precision="ieee")
        x = tl.dot(rotated, tl.trans(k), x, input_precision="ieee")
    else:
        k, key_scale = rows_of_cache(keys, key_scales, where, scale_at, seen, D, BD, DOT, KIND, MASKED)
        x = tl.dot(q, tl.trans(k), input_precision="ieee")
    if KIND != PLAIN:
        x = x * key_scale[None, :]
    x = scores_of(x, key, sight, score, SPEC)
    if MASKED:
        visible = key[None, :] <= last[:, None]
        if SPEC[0]:
            visible &= key[None, :] >= first_seen(position, window, SPEC)[:, None]
        x = tl.where(visible, x, float("-inf"))
    exponent = LOG2E if SPEC[1] or SPEC[2] or SPEC[4] else factor
    return update(x, v, value_scale, m, e, acc, exponent, DOT, KIND)


@triton.jit
def fold(total_m, total_e, m, e):
    """Maximum and sum after one more split (m, e), and the factors of what was before and of the split."""
    new = tl.maximum(total_m, m)
    base = tl.where(new == float("-inf"), 0.0, new)
    before, after = tl.exp2(total_m - base), tl.exp2(m - base)
    return new, tl.fma(e, after, total_e * before), before, after


@triton.jit
def with_sink(m, e, sink):
    """Sum and factor of the numerator once a logit without a value took part (Xiao et al. 2023)."""
    new = tl.maximum(m, sink * LOG2E)
    factor = tl.exp2(m - new)
    own = tl.exp2(tl.fma(sink, tl.zeros_like(sink) + LOG2E, -new))
    return tl.fma(e, factor, own), factor


@triton.jit
def queries_of(qkv, rotated, row, head, real, row_step, rotated_step, rotated_width, D: tl.constexpr, BD: tl.constexpr,
               R: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Queries [BM, BD] of a tile, zeros in rows that are none, and the ends of others of `rotated_width` numbers."""
    d = tl.arange(0, BD)
    at = qkv + row[:, None] * row_step + head[:, None] * D + d[None, :]
    q = tl.load(at, mask=real[:, None] & (d < D)[None, :], other=0.0).to(DOT)
    second = q
    if R > 0:
        r = tl.arange(0, 16 if R < 16 else triton.next_power_of_2(R))
        end = rotated + row[:, None] * rotated_step + ((head + 1) * rotated_width - R)[:, None] + r[None, :]
        second = tl.load(end, mask=real[:, None] & (r < R)[None, :], other=0.0).to(DOT)
    return q, second


@triton.jit
def first_seen(position, window, SPEC: tl.constexpr):
    """The first position that a row at `position` sees of a window, or of chunks, of `window` tokens."""
    if SPEC[0] == CHUNKED:
        first = position - position % window
    else:
        first = tl.maximum(position - window + 1, 0)
    return first


@triton.jit
def root_of(begin, n, length, tree, SPEC: tl.constexpr):
    """Position of a sequence's first drafted row; its length when it has none."""
    root = length
    if SPEC[3]:
        row = begin + n - 64 + tl.arange(0, 64)
        masks = tl.load(tree + row, mask=row >= begin, other=0)
        root = length - tl.sum((masks != 0).to(tl.int32), 0)
    return root


@triton.jit
def tile_of_rows(inputs, steps, begin, n, length, first, step, root, head, left, D: tl.constexpr, BD: tl.constexpr,
                 TILE_HEADS: tl.constexpr, BM: tl.constexpr, R: tl.constexpr, SPEC: tl.constexpr,
                 DOT: tl.constexpr):  # fmt: skip
    """The BM rows of `step` tokens from `first` on and of heads head..head + left, and what they see.

    inputs = (qkv, rotated, slopes, tree, window). Returns (batch row, head, is it one), queries, (slopes, places in the
    biases), sight as in `tile_of_keys`, position of the first row, (root, mask).
    """
    qkv, rotated, slopes, tree, window = inputs
    row_step, rotated_step, rotated_width = steps
    index = tl.arange(0, BM)
    token, heads = first + index // TILE_HEADS, index % TILE_HEADS
    real = (token < n) & (token < first + step) & (index < BM // TILE_HEADS * TILE_HEADS) & (heads < left)
    row, heads = (begin + token).to(tl.int64), head + heads
    position, mask, slope, bias_at = length - n + token, root, token, token
    if SPEC[3]:
        own = tl.load(tree + row, mask=real, other=0)
        position = tl.where(own != 0, root + popcount(own) - 1, position)
        mask = tl.where(step == 1, tl.load(tree + begin + first), 0)
    if SPEC[2]:
        slope = tl.load(slopes + heads, mask=real, other=0.0)
    if SPEC[4]:
        bias_at = tl.where(real, heads, 0) * SPEC[4]
    queries = queries_of(qkv, rotated, row, heads, real, row_step, rotated_step, rotated_width, D, BD, R, DOT)
    last = tl.where(real, tl.minimum(position + SPEC[5], length - 1) if SPEC[5] else position, -1)
    lowest, high = tl.min(tl.where(real, position, length), 0), tl.max(last, 0) + 1
    low = 0
    if SPEC[0]:
        low = first_seen(lowest, window, SPEC)
    return (row, heads, real), queries, (slope, bias_at), (position, last, low, high), lowest, (root, mask)


@triton.jit(do_not_specialize=["splits", "parts"])
def split_kernel(part_acc, part_ml, qkv, rotated, keys, values, key_scales, value_scales, cu_q, context, tables, slopes,
                 bias, tree, factor, cap, window, row_step, rotated_step, rotated_width, table_step, block_step,
                 key_step, head_step, heads, splits, parts, D: tl.constexpr, BD: tl.constexpr, SIZE: tl.constexpr,
                 GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
                 SPLIT: tl.constexpr, SPEC: tl.constexpr, DOT: tl.constexpr, KIND: tl.constexpr,
                 SINGLE: tl.constexpr):  # fmt: skip
    """Softmax and its sum over values of each row and split. Grid: (sequences, tiles of heads, `parts`).

    A program takes every `parts`-th pair of a split and a tile of rows of its sequence. SINGLE: only sequences of one
    row, whose results lie at the sequence's number; else all rows of all sequences, at their numbers.
    """
    s = tl.program_id(0)
    begin = tl.load(cu_q + s)
    n = tl.load(cu_q + s + 1) - begin
    length = tl.load(context + s)
    tiles: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    TOKENS: tl.constexpr = BM // TILE_HEADS
    kv_head = tl.program_id(1) // tiles
    head = kv_head * GROUP + tl.program_id(1) % tiles * TILE_HEADS
    kv = (keys, values, key_scales, value_scales, tables + s.to(tl.int64) * table_step, block_step,
          key_step, kv_head.to(tl.int64) * head_step)  # fmt: skip
    root = root_of(begin, n, length, tree, SPEC)
    d = tl.arange(0, BD)
    blocks = tl.cdiv(n, TOKENS)
    pairs = tl.cdiv(length, SPLIT) * blocks
    if SINGLE and n != 1:
        pairs = 0
    for pair in range(tl.program_id(2), pairs, parts):
        split = pair // blocks
        start = pair % blocks * TOKENS
        step = TOKENS
        if SPEC[3] and split >= root // SPLIT:
            step = 1  # a drafted row's keys lie where only it has them
        for first in range(start, tl.minimum(start + TOKENS, n), step):
            where, queries, of_row, sight, _, one = tile_of_rows(
                (qkv, rotated, slopes, tree, window), (row_step, rotated_step, rotated_width), begin, n, length, first,
                step, root, head, (kv_head + 1) * GROUP - head, D, BD, TILE_HEADS, BM, R, SPEC, DOT)  # fmt: skip
            row, at_head, real = where
            position, last, low, high = sight
            low, high = tl.maximum(low, split * SPLIT), tl.minimum(high, (split + 1) * SPLIT)
            if low < high:
                m = tl.full([BM], float("-inf"), tl.float32)
                e = tl.zeros([BM], tl.float32)
                acc = tl.zeros([BM, BD], tl.float32)
                for at in range(low // BN * BN, high, BN):
                    m, e, acc = tile_of_keys(at, queries, m, e, acc, kv, (position, last, low, high),
                                             (factor, cap, bias, of_row, window), one, D, BD, SIZE, BN, R, SPEC, DOT,
                                             KIND, True)  # fmt: skip
                out = ((s.to(tl.int64) if SINGLE else row) * heads + at_head) * splits + split
                tl.store(part_ml + out * 2, m, mask=real)
                tl.store(part_ml + out * 2 + 1, e, mask=real)
                tl.store(part_acc + out[:, None] * D + d[None, :], acc, mask=real[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(out, part_acc, part_ml, cu_q, context, sinks, tree, window, heads, splits, D: tl.constexpr,
                 BD: tl.constexpr, BH: tl.constexpr, SPLIT: tl.constexpr, SPEC: tl.constexpr,
                 SINGLE: tl.constexpr):  # fmt: skip
    """Fold the splits of each row of `split_kernel` in ascending order. Grid: (sequences, heads / BH)."""
    s, head = tl.program_id(0), tl.program_id(1) * BH + tl.arange(0, BH)
    begin = tl.load(cu_q + s)
    n = tl.load(cu_q + s + 1) - begin
    length = tl.load(context + s)
    d = tl.arange(0, BD)
    inside = (head < heads)[:, None] & (d < D)[None, :]
    root = root_of(begin, n, length, tree, SPEC)
    rows = n
    if SINGLE and n != 1:
        rows = 0
    for token in range(rows):
        position = length - n + token
        if SPEC[3]:
            mask = tl.load(tree + begin + token)
            if mask != 0:
                position = root + popcount(mask) - 1
        lowest, highest = 0, tl.minimum(position + SPEC[5], length - 1) // SPLIT
        if SPEC[0]:
            lowest = first_seen(position, window, SPEC) // SPLIT
        place = s.to(tl.int64) if SINGLE else (begin + token).to(tl.int64)
        m = tl.full([BH], float("-inf"), tl.float32)
        e = tl.zeros([BH], tl.float32)
        acc = tl.zeros([BH, BD], tl.float32)
        for split in range(lowest, highest + 1):
            at = (place * heads + head) * splits + split
            part = tl.load(part_acc + at[:, None] * D + d[None, :], mask=inside, other=0.0)
            one_m = tl.load(part_ml + at * 2, mask=head < heads, other=0.0)
            one_e = tl.load(part_ml + at * 2 + 1, mask=head < heads, other=1.0)
            m, e, before, after = fold(m, e, one_m, one_e)
            acc = tl.fma(part, tl.broadcast_to(after[:, None], acc.shape), acc * before[:, None])
        if sinks is not None:
            e, before = with_sink(m, e, tl.load(sinks + head, mask=head < heads, other=0.0))
            acc = acc * before[:, None]
        row = (begin + token).to(tl.int64) * heads + head
        tl.store(out + row[:, None] * D + d[None, :], acc / e[:, None], mask=inside)
