"""What writes the caches on the GPU: rotation of queries and keys with the store of keys and values, whole blocks.

Rows are changed in place behind a barrier: a tile of fewer numbers than threads lies in several warps, of which one
stores it, perhaps before another has loaded it. Keys leave in the cache's type from f32, codes with one scale per token
and head as `quantize_rows` of `ops/reference/caches.py` defines them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.interpreter import repair

repair()
PLAIN, INT8, FP8 = (tl.constexpr(i) for i in range(3))
"""What a cache holds: numbers, or codes with scales."""


@triton.jit
def to_e4m3(x):
    """f32 of at most 448 in magnitude to e4m3, half to even, as uint8; no device of compute capability 8.0 has it."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + ((size >> 20) & 1) >> 20) - (120 << 3)
    tiny = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # one unit of 16384 is the smallest code
    code = tl.where(size < (121 << 23), tiny, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_code(x, KIND: tl.constexpr):
    """Scaled numbers as the bytes of a cache; int8 by adding what leaves no bits for a fraction, half to even."""
    if KIND == INT8:
        return ((x + 12582912.0) - 12582912.0).to(tl.int32).to(tl.int8).to(tl.uint8, bitcast=True)
    return to_e4m3(x)


@triton.jit
def largest(x, inside):
    """Largest magnitude of each row of x [BH, B], inf where one is NaN."""
    size = tl.where(x == x, tl.abs(x), float("inf"))
    return tl.max(tl.where(inside, size, 0.0), 1)


@triton.jit
def load_heads(x, norm, eps, inside, D: tl.constexpr, HALF: tl.constexpr, HB: tl.constexpr, RB: tl.constexpr):
    """Heads at x [BH]: first numbers of pairs [BH, HB], second ones, the rest [BH, RB]; normed if norm is given."""
    i, j = tl.arange(0, HB), tl.arange(0, RB)
    paired, left = inside[:, None] & (i < HALF)[None, :], inside[:, None] & (j < D - 2 * HALF)[None, :]
    a = tl.load(x[:, None] + i[None, :], mask=paired, other=0.0).to(tl.float32)
    b = tl.load(x[:, None] + HALF + i[None, :], mask=paired, other=0.0).to(tl.float32)
    c = tl.load(x[:, None] + 2 * HALF + j[None, :], mask=left, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        factor = tl.rsqrt(squares / D + eps)[:, None]
        a = a * factor * tl.load(norm + i, mask=i < HALF, other=0.0)[None, :]
        b = b * factor * tl.load(norm + HALF + i, mask=i < HALF, other=0.0)[None, :]
        c = c * factor * tl.load(norm + 2 * HALF + j, mask=j < D - 2 * HALF, other=0.0)[None, :]
    return a, b, c, paired, left


@triton.jit
def turn(a, b, table, position, HALF: tl.constexpr, HB: tl.constexpr):
    """Pairs (a, b) [BH, HB] turned by the angles of `position` (Su et al. 2021)."""
    i = tl.arange(0, HB)
    at = table + position.to(tl.int64) * 2 * HALF + i
    cos = tl.load(at, mask=i < HALF, other=1.0)[None, :]
    sin = tl.load(at + HALF, mask=i < HALF, other=0.0)[None, :]
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def store_heads(x, a, b, c, paired, left, HALF: tl.constexpr, HB: tl.constexpr, RB: tl.constexpr):
    """The parts of heads back to x [BH]."""
    i, j = tl.arange(0, HB), tl.arange(0, RB)
    tl.store(x[:, None] + i[None, :], a, mask=paired)
    tl.store(x[:, None] + HALF + i[None, :], b, mask=paired)
    tl.store(x[:, None] + 2 * HALF + j[None, :], c, mask=left)


@triton.jit
def store_cached(cache, scales, where, scale_at, a, b, c, paired, left, inside, most, HALF: tl.constexpr,
                 HB: tl.constexpr, RB: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Heads into a cache at elements `where` [BH]; codes of at most `most` with their scales at `scale_at` [BH]."""
    if KIND == PLAIN:
        store_heads(cache + where, a, b, c, paired, left, HALF, HB, RB)
    else:
        top = tl.maximum(tl.maximum(largest(a, paired), largest(b, paired)), largest(c, left))
        finite = top < float("inf")
        factor = tl.where(finite & (top > 1e-36), most / top, 0.0)[:, None]
        tl.store(scales + scale_at, tl.where(finite, top / most, float("nan")), mask=inside)
        a = to_code(tl.where(finite[:, None], a * factor, 0.0), KIND)
        b = to_code(tl.where(finite[:, None], b * factor, 0.0), KIND)
        c = to_code(tl.where(finite[:, None], c * factor, 0.0), KIND)
        store_heads(cache + where, a, b, c, paired, left, HALF, HB, RB)


@triton.jit
def rope_kernel(qkv, positions, table, slots, keys, values, key_scales, value_scales, q_norm, k_norm, eps, most,
                block_step, head_step, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
                HB: tl.constexpr, RB: tl.constexpr, SIZE: tl.constexpr, BH: tl.constexpr,
                KIND: tl.constexpr):  # fmt: skip
    """Queries and keys turned in place, keys and values stored; nothing at a negative slot.

    Grid: (rows, tiles of BH query heads and then of BH key heads).
    """
    t = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (HEADS + BH - 1) // BH
    number = tl.program_id(1)
    position = tl.load(positions + t)
    row = qkv + t * ((HEADS + 2 * KV) * D)
    if number < tiles:
        head = number * BH + tl.arange(0, BH)
        a, b, c, paired, left = load_heads(row + head * D, q_norm, eps, head < HEADS, D, HALF, HB, RB)
        tl.debug_barrier()
        a, b = turn(a, b, table, position, HALF, HB)
        store_heads(row + head * D, a, b, c, paired, left, HALF, HB, RB)
    else:
        head = (number - tiles) * BH + tl.arange(0, BH)
        slot = tl.load(slots + t)
        inside = (head < KV) & (slot >= 0)
        at = slot // SIZE * block_step + head * head_step
        where, scale_at = at + slot % SIZE * D, (at + SIZE * D) // 4 + slot % SIZE
        x = row + (HEADS + head) * D
        a, b, c, paired, left = load_heads(x, k_norm, eps, head < KV, D, HALF, HB, RB)
        tl.debug_barrier()
        a, b = turn(a, b, table, position, HALF, HB)
        store_heads(x, a, b, c, paired, left, HALF, HB, RB)
        kept, rest = paired & inside[:, None], left & inside[:, None]
        store_cached(keys, key_scales, where, scale_at, a, b, c, kept, rest, inside, most, HALF, HB, RB, KIND)
        a, b, c, paired, left = load_heads(x + KV * D, None, eps, inside, D, HALF, HB, RB)
        store_cached(values, value_scales, where, scale_at, a, b, c, paired, left, inside, most, HALF, HB, RB, KIND)


@triton.jit
def queries_kernel(out, q, positions, table, norm, eps, pad, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
                   HB: tl.constexpr, RB: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Queries turned into rows that have `pad` more heads. Grid: (rows, tiles of BH heads)."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    position = tl.load(positions + t)
    a, b, c, paired, left = load_heads(q + (t * HEADS + head) * D, norm, eps, head < HEADS, D, HALF, HB, RB)
    a, b = turn(a, b, table, position, HALF, HB)
    store_heads(out + (t * (HEADS + pad) + head) * D, a, b, c, paired, left, HALF, HB, RB)


@triton.jit
def latent_rope_kernel(q, kv, positions, table, slots, keys, values, norm, eps, key_step, value_step, heads, width,
                       R: tl.constexpr, RANK: tl.constexpr, BRANK: tl.constexpr, HB: tl.constexpr, SIZE: tl.constexpr,
                       BH: tl.constexpr):  # fmt: skip
    """Ends of queries turned, latents normed and keys turned, both stored. Grid: (rows, tiles of BH heads and one)."""
    t = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + t)
    if tl.program_id(1) + 1 < tl.num_programs(1):
        head = tl.program_id(1) * BH + tl.arange(0, BH)
        x = q + (t * heads + head) * width + width - R
        a, b, c, paired, left = load_heads(x, None, eps, head < heads, R, R // 2, HB, 1)
        tl.debug_barrier()
        a, b = turn(a, b, table, position, R // 2, HB)
        store_heads(x, a, b, c, paired, left, R // 2, HB, 1)
    else:  # no name of the other branch: what has it has one type in both
        slot = tl.load(slots + t)
        key = kv + t * (RANK + R) + RANK + tl.zeros([1], tl.int64)
        one = tl.zeros([1], tl.int32) == 0
        first, second, rest, pairs, none = load_heads(key, None, eps, one, R, R // 2, HB, 1)
        column = tl.arange(0, BRANK)
        inside = column < RANK
        latent = tl.load(kv + t * (RANK + R) + column, mask=inside, other=0.0).to(tl.float32)
        tl.debug_barrier()
        first, second = turn(first, second, table, position, R // 2, HB)
        store_heads(key, first, second, rest, pairs, none, R // 2, HB, 1)
        pairs = pairs & (slot >= 0)
        at = keys + slot // SIZE * key_step + slot % SIZE * R + tl.zeros([1], tl.int64)
        store_heads(at, first, second, rest, pairs, none, R // 2, HB, 1)
        latent = latent * tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
        latent = latent * tl.load(norm + column, mask=inside, other=0.0)
        tl.store(kv + t * (RANK + R) + column, latent, mask=inside)
        at_latent = values + slot // SIZE * value_step + slot % SIZE * RANK
        tl.store(at_latent + column, latent, mask=inside & (slot >= 0))


@triton.jit(do_not_specialize=["count"])
def copy_kernel(addresses, pairs, count, words, BLOCK: tl.constexpr):
    """Blocks of `words` 32-bit words, source -> destination in order, at each address. Grid: (words / BLOCK, tensors).

    A word is carried through all pairs by one thread, so that a chain of copies is a chain.
    """
    base = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for pair in range(count):
        source, target = tl.load(pairs + pair * 2), tl.load(pairs + pair * 2 + 1)
        found = tl.load(base + source * words + word, mask=word < words)
        tl.store(base + target * words + word, found, mask=word < words)


@triton.jit(do_not_specialize=["count"])
def move_kernel(addresses, pairs, count, block_words, head_words, SIZE: tl.constexpr, ROW: tl.constexpr,
                SCALED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Tokens, slot source -> destination in order, at each address: rows of ROW words, a scale of each behind them.

    Grid: (heads, tensors). A word is carried through all pairs by one thread, as in `copy_kernel`.
    """
    base = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(tl.int32)) + tl.program_id(0) * head_words
    word = tl.arange(0, BLOCK)
    for pair in range(count):
        source, target = tl.load(pairs + pair * 2), tl.load(pairs + pair * 2 + 1)
        begin, end = base + source // SIZE * block_words, base + target // SIZE * block_words
        at = tl.where(word < ROW, source % SIZE * ROW + word, SIZE * ROW + source % SIZE)
        to = tl.where(word < ROW, target % SIZE * ROW + word, SIZE * ROW + target % SIZE)
        tl.store(end + to, tl.load(begin + at, mask=word < ROW + SCALED), mask=word < ROW + SCALED)


@triton.jit
def zero_kernel(addresses, blocks, words, BLOCK: tl.constexpr):
    """Zeros into blocks of `words` 32-bit words at each address. Grid: (blocks, tensors, words / BLOCK)."""
    base = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(blocks + tl.program_id(0))
    tl.store(base + block * words + word, tl.zeros([BLOCK], tl.int32), mask=word < words)
