"""Triton kernels of sampling: a program per row of logits f32 [R, V], which walks the row in blocks, from the L2 cache.

Nothing is sorted: the threshold of top-k or top-p is searched, each walk over the row narrowing its range eightfold
(FlashInfer, Ye et al. 2025, searches likewise, by chance). Weights are float32, their sums and the times of the race
that draws float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.interpreter import repair

repair()
LOWEST = tl.constexpr(-2139095041)
"""The key of -inf."""
PIVOTS = tl.constexpr(8)
BIG = tl.constexpr(1 << 30)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _key(x):
    """Numbers as integers in the same order; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _block(at, start, vocab, BLOCK: tl.constexpr):
    """(numbers, ids) of a block of the row; -inf past its end."""
    ids = start + tl.arange(0, BLOCK)
    return tl.load(at + ids, mask=ids < vocab, other=float("-inf")), ids


@triton.jit
def _weight(x, top, rate):
    """exp((x - top) / temperature), `rate` being log2(e) / temperature."""
    return tl.exp2((x - top) * rate)


@triton.jit
def _survey(at, vocab, BLOCK: tl.constexpr):
    """(the largest number, the lowest id that has it, flags) of a row."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where, broken = tl.full((BLOCK,), BIG, tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        x, ids = _block(at, start, vocab, BLOCK)
        broken |= (x != x).to(tl.int32)
        where = tl.where(x > best, ids, where)
        best = tl.where(x > best, x, best)
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top, where, BIG), 0)
    flags = tl.where(top == float("-inf"), 2, 0)
    flags = tl.where((top == float("inf")) | (tl.max(broken, 0) == 1), 1, flags)
    return top, first, flags


@triton.jit
def _above(at, vocab, key, floor, top, rate, BLOCK: tl.constexpr):
    """(how many, their weight f64) have keys above `key`, the weight of those at least `floor`; how many have `key`."""
    count, same, mass = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocab, BLOCK):
        x, ids = _block(at, start, vocab, BLOCK)
        own, kept = _key(x), x.to(tl.float64) >= floor
        same += ((own == key) & (ids < vocab)).to(tl.int32)
        count += (own > key).to(tl.int32)
        mass += tl.where((own > key) & kept, _weight(x, top, rate), 0.0).to(tl.float64)
    return tl.sum(count, 0), tl.sum(mass, 0), tl.sum(same, 0)


@triton.jit
def _search(at, vocab, target, low, high, top, rate, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key with `target` numbers (COUNT) or weight at or above it; low has, high (both int64) has not."""
    steps = tl.arange(0, PIVOTS).to(tl.int64)
    while high - low > 1:
        pivots = low + (high - low) * steps // PIVOTS  # the first is low
        measure = tl.zeros((PIVOTS, BLOCK), tl.int32 if COUNT else tl.float32)
        for start in range(0, vocab, BLOCK):
            x, ids = _block(at, start, vocab, BLOCK)
            inside = (_key(x)[None, :] >= pivots.to(tl.int32)[:, None]) & (ids < vocab)[None, :]
            if COUNT:
                measure += inside.to(tl.int32)
            else:
                measure += tl.where(inside, _weight(x, top, rate)[None, :], 0.0)
        enough = tl.sum(measure.to(tl.float64), 1) >= target
        next_low = tl.max(tl.where(enough, pivots, low), 0)
        high = tl.min(tl.where((~enough) & (pivots > next_low), pivots, high), 0)
        low = next_low
    return low.to(tl.int32)


@triton.jit
def _noise(seed, position, stream, ids):
    """Numbers in (0, 1) of 32 bits that tokens `ids` have: Philox 4x32-10 (Salmon et al. 2011), see quire.ops.philox.

    Every lane computes the four words of its counter and takes one.
    """
    low = tl.full((), 0xFFFFFFFF, tl.uint64)
    p, s, k = position.to(tl.uint64), stream.to(tl.uint64), seed.to(tl.uint64)
    c3 = (ids // 64 * 16 + ids % 16).to(tl.uint64)
    nothing = tl.zeros_like(c3)
    c0, c1, c2, k0, k1 = (p & low) + nothing, (p >> 32) + nothing, (s & low) + nothing, k & low, k >> 32
    for _ in tl.static_range(10):
        p0, p1 = c0 * tl.full((), 0xD2511F53, tl.uint64), c2 * tl.full((), 0xCD9E8D57, tl.uint64)
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & low, (p0 >> 32) ^ c3 ^ k1, p0 & low
        k0 = (k0 + tl.full((), 0x9E3779B9, tl.uint64)) & low
        k1 = (k1 + tl.full((), 0xBB67AE85, tl.uint64)) & low
    word = ids % 64 // 16
    bits = tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))
    return (bits.to(tl.int64).to(tl.float64) + 0.5) * (1.0 / (1 << 32))


@triton.jit
def _race(at, vocab, name, key, ties, floor, top, rate, BLOCK: tl.constexpr):
    """The token of what is kept that arrives first: `name` (seed, position, stream) gives each its number.

    Kept are keys above `key`, and the `ties` lowest ids that have it, where numbers are at least `floor`.
    """
    seed, position, stream = name
    best, winner = tl.full((), -1.0, tl.float64), tl.full((), 0, tl.int32)
    seen = tl.full((), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        x, ids = _block(at, start, vocab, BLOCK)
        own = _key(x)
        tied = (own == key).to(tl.int32)
        rank = seen + tl.cumsum(tied, 0)
        kept = ((own > key) | ((tied == 1) & (rank <= ties))) & (x.to(tl.float64) >= floor) & (ids < vocab)
        v = _noise(seed, position, stream, ids)
        time = tl.where(v < 1e-3, v * (1 + v * (0.5 + v * (1.0 / 3 + v * 0.25))), -tl.log(1 - v))
        speed = tl.where(kept, _weight(x, top, rate).to(tl.float64) / time, -1.0)
        fastest = tl.max(speed, 0)
        first = tl.min(tl.where(speed == fastest, ids, BIG), 0)
        winner = tl.where(fastest > best, first, winner)
        best = tl.maximum(best, fastest)
        seen = tl.max(rank, 0)
    return winner


@triton.jit
def sample_kernel(tokens, flags, logits, ints, longs, doubles, vocab, BLOCK: tl.constexpr):
    """A program per record (ops/sampling.py's DRAW, seen as int32 [n, 14], int64 and float64 [n, 7])."""
    n = tl.program_id(0)
    at = logits + tl.load(ints + n * 14).to(tl.int64) * vocab
    top, first, flag = _survey(at, vocab, BLOCK)
    tl.store(flags + n, flag)
    temperature = tl.load(doubles + n * 7 + 4)
    if (flag > 0) | (temperature < 1e-5):
        tl.store(tokens + n, tl.where(flag > 0, -1, first))
        return
    top_k, top_p, min_p = tl.load(ints + n * 14 + 1), tl.load(doubles + n * 7 + 5), tl.load(doubles + n * 7 + 6)
    rate = (1.4426950408889634 / temperature).to(tl.float32)
    high = _key(top).to(tl.int64) + 1
    key, ties = tl.full((), LOWEST, tl.int32), tl.full((), BIG, tl.int32)
    everything = tl.full((), float("-inf"), tl.float64)
    if (top_k > 0) & (top_k < vocab):
        lowest = tl.full((), LOWEST, tl.int64)
        key = _search(at, vocab, top_k.to(tl.float64), lowest, high, top, rate, True, BLOCK)
        count, _, _ = _above(at, vocab, key, everything, top, rate, BLOCK)
        ties = top_k - count
    if top_p < 1:
        _, mass, same = _above(at, vocab, key, everything, top, rate, BLOCK)
        own = _weight(_number(key), top, rate).to(tl.float64)
        available = tl.minimum(ties, same)
        target = top_p * (mass + available * own)
        least = key
        key = _search(at, vocab, target, key.to(tl.int64), high, top, rate, False, BLOCK)
        _, mass, same = _above(at, vocab, key, everything, top, rate, BLOCK)
        own = _weight(_number(key), top, rate).to(tl.float64)
        available = tl.where(key == least, tl.minimum(ties, same), same)
        wanted = tl.where(own > 0, tl.ceil((target - mass) / tl.where(own > 0, own, 1.0)), 1.0)
        ties = tl.minimum(tl.maximum(wanted, 1.0), available.to(tl.float64)).to(tl.int32)
    floor = everything
    if min_p > 0:
        floor = top.to(tl.float64) + temperature * tl.log(min_p)
    longs += n * 7
    name = (tl.load(longs + 1), tl.load(longs + 2), tl.load(longs + 3))
    tl.store(tokens + n, _race(at, vocab, name, key, ties, floor, top, rate, BLOCK))


@triton.jit
def _number(key):
    """The number that has a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["k"])
def logprobs_kernel(doubles, floats, ints, ids, logprobs, logits, queries, vocab, k, BLOCK: tl.constexpr):
    """A program per query (row, target): its record (ops/sampling.py's SCORE, seen as float64 [n, 3], float32 and int32
    [n, 6]) and the k best ids and log-probabilities [n, k], each by one walk over the row."""
    n = tl.program_id(0)
    at = logits + tl.load(queries + n * 2).to(tl.int64) * vocab
    target = tl.load(queries + n * 2 + 1)
    top, _, flag = _survey(at, vocab, BLOCK)
    tl.store(ints + n * 6 + 4, flag)
    if flag > 0:
        for i in range(k):
            tl.store(ids + n * k + i, -1)
            tl.store(logprobs + n * k + i, float("-inf"))
        return
    own = tl.load(at + target)
    mass, rank = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        x, number = _block(at, start, vocab, BLOCK)
        mass += _weight(x, top, LOG2E).to(tl.float64)
        rank += ((x > own) | ((x == own) & (number < target))).to(tl.int32)
    total = top.to(tl.float64) + tl.log(tl.sum(mass, 0))
    tl.store(doubles + n * 3, total)
    tl.store(floats + n * 6 + 2, (own.to(tl.float64) - total).to(tl.float32))
    tl.store(ints + n * 6 + 3, 1 + tl.sum(rank, 0))
    previous = tl.full((), (1 << 63) - 1, tl.int64)
    for i in range(k):
        best = tl.full((BLOCK,), -(1 << 63), tl.int64)
        for start in range(0, vocab, BLOCK):
            x, number = _block(at, start, vocab, BLOCK)
            place = (_key(x).to(tl.int64) << 32) + (BIG - number)  # equal numbers: the lower id is the larger
            best = tl.maximum(best, tl.where((place < previous) & (x > float("-inf")), place, -(1 << 63)))
        previous = tl.max(best, 0)
        there = previous > -(1 << 63)
        id = tl.where(there, BIG - (previous & 0xFFFFFFFF), 0).to(tl.int32)
        x = tl.load(at + id).to(tl.float64) - total
        tl.store(ids + n * k + i, tl.where(there, id, -1))
        tl.store(logprobs + n * k + i, tl.where(there, x, float("-inf")).to(tl.float32))


@triton.jit
def _hide(at, ids, kept):
    """-inf at ids, where numbers are neither NaN nor inf."""
    x = tl.load(at + ids, mask=kept, other=0.0)
    tl.store(at + ids, float("-inf"), mask=kept & (x < float("inf")))


@triton.jit
def penalize_kernel(logits, data, numbers, saved, vocab, HEAD: tl.constexpr, BLOCK: tl.constexpr):
    """A program per edit of a row. `data` int32 starts with HEAD numbers per edit, `numbers` is the same as float32.

    These are: row; where each list begins and its length: allowed (-1: all), banned, bias (its values follow its ids),
    seen (its counts follow); place in `saved`, which holds allowed logits meanwhile; three penalties as float32;
    where a mask begins (-1: none).
    """
    head, at_id = data + tl.program_id(0) * HEAD, tl.arange(0, BLOCK)
    at = logits + tl.load(head).to(tl.int64) * vocab
    mask = tl.load(head + 13)
    if mask >= 0:
        for start in range(0, vocab, BLOCK):
            ids = start + at_id
            word = tl.load(data + mask + ids // 32, mask=ids < vocab, other=-1)
            _hide(at, ids, (ids < vocab) & (((word >> (ids % 32)) & 1) == 0))
        tl.debug_barrier()
    allowed, count, spare = data + tl.load(head + 1), tl.load(head + 2), saved + tl.load(head + 9)
    if count >= 0:
        for start in range(0, count, BLOCK):
            kept = start + at_id < count
            ids = tl.load(allowed + start + at_id, mask=kept, other=0)
            tl.store(spare + start + at_id, tl.load(at + ids, mask=kept, other=0.0), mask=kept)
        tl.debug_barrier()
        for start in range(0, vocab, BLOCK):
            _hide(at, start + at_id, start + at_id < vocab)
        tl.debug_barrier()
        for start in range(0, count, BLOCK):
            kept = start + at_id < count
            ids = tl.load(allowed + start + at_id, mask=kept, other=0)
            tl.store(at + ids, tl.load(spare + start + at_id, mask=kept, other=0.0), mask=kept)
        tl.debug_barrier()
    banned, count = data + tl.load(head + 3), tl.load(head + 4)
    for start in range(0, count, BLOCK):
        kept = start + at_id < count
        _hide(at, tl.load(banned + start + at_id, mask=kept, other=0), kept)
    tl.debug_barrier()
    begin, count = tl.load(head + 5), tl.load(head + 6)
    for start in range(0, count, BLOCK):
        kept = start + at_id < count
        ids = tl.load(data + begin + start + at_id, mask=kept, other=0)
        value = tl.load(numbers + begin + count + start + at_id, mask=kept, other=0.0)
        tl.store(at + ids, tl.load(at + ids, mask=kept, other=0.0) + value, mask=kept)
    tl.debug_barrier()
    _penalize_seen(at, data, tl.load(head + 7), tl.load(head + 8), numbers + tl.program_id(0) * HEAD + 10, BLOCK)


@triton.jit
def _penalize_seen(at, data, begin, count, penalties, BLOCK: tl.constexpr):
    """Repetition, frequency and presence penalties of the ids that prompt and output hold."""
    repetition, frequency, presence = tl.load(penalties), tl.load(penalties + 1), tl.load(penalties + 2)
    at_id = tl.arange(0, BLOCK)
    for start in range(0, count, BLOCK):
        kept = start + at_id < count
        ids = tl.load(data + begin + start + at_id, mask=kept, other=0)
        times = tl.load(data + begin + count + start + at_id, mask=kept, other=0)
        x = tl.load(at + ids, mask=kept, other=0.0)
        x = tl.where(x > 0, tl.math.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x = x - frequency * times.to(tl.float32) - tl.where(times > 0, presence, 0.0)
        tl.store(at + ids, x, mask=kept)
