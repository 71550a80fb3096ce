"""Rows of several streams side by side on the GPU, and gates that few numbers pass. Everything is f32 between load and
store.

As in `rowwise_kernels`, a sum has one order, which depends on the row's length alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix_kernel(out, x, m, weight, bias, h, p, BP: tl.constexpr, BH: tl.constexpr, STREAMS: tl.constexpr,
               OUT: tl.constexpr):  # fmt: skip
    """Stream i of out [OUT, h] = sum over j of (bias + weight m)[i, j] * stream j of x [STREAMS, h], of each row.

    Grid: (rows, h / BH).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BH + tl.arange(0, BH)
    inside, number = column < h, tl.arange(0, BP)
    given = tl.load(m + row * p + number, mask=number < p, other=0.0).to(tl.float32)
    for i in range(OUT):
        mixed = tl.zeros((BH,), tl.float32)
        for j in range(STREAMS):
            pair = i * STREAMS + j
            factors = tl.load(weight + pair * p + number, mask=number < p, other=0.0)
            factor = tl.load(bias + pair) + tl.sum(factors * given, 0)
            stream = tl.load(x + (row * STREAMS + j) * h + column, mask=inside, other=0.0)
            mixed += factor * stream.to(tl.float32)
        tl.store(out + (row * OUT + i) * h + column, mixed, mask=inside)


@triton.jit
def lengths_kernel(x, h, streams, least, BH: tl.constexpr):
    """Streams behind the first of rows [streams, h] get its root mean square, in place. Grid: (rows, streams - 1)."""
    row, stream = tl.program_id(0).to(tl.int64), tl.program_id(1) + 1
    column = tl.arange(0, BH)
    inside, at = column < h, x + row * streams * h + column
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(at + stream * h, mask=inside, other=0.0).to(tl.float32)
    square = tl.sum(own * own, 0) / h
    square = tl.where(square < least, least, square)
    by = tl.sqrt(tl.sum(first * first, 0) / h) / tl.sqrt(square)
    tl.store(at + stream * h, own * by, mask=inside)


@triton.jit
def sparse_gate_kernel(x, f, factor, BF: tl.constexpr):
    """The first f of rows [2 f] less mean + factor * deviation, 0 where that is below, in place. Grid: (rows,)."""
    column = tl.arange(0, BF)
    inside, at = column < f, x + tl.program_id(0).to(tl.int64) * 2 * f + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(gate, 0) / f
    centered = tl.where(inside, gate - mean, 0.0)
    passed = gate - (mean + factor * tl.sqrt(tl.sum(centered * centered, 0) / f))
    tl.store(at, tl.where(passed < 0, 0.0, passed), mask=inside)
