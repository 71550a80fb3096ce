"""Causal convolutions over tokens on the GPU: a program for each row and tile of channels.

A program computes the rows that it reads anew from what the batch holds of them, rounded as the cache keeps them, so
that no program waits for what another one stores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.rowwise_kernels import SILU, activate


@triton.jit
def row_before(r, ancestors, BACK: tl.constexpr):
    """The row BACK rows before row r in what it continues: its ancestors' where it is of a draft that branches."""
    bits = tl.arange(0, 64)
    highest = tl.max(tl.where((ancestors >> bits) & 1 == 1, bits, -1), 0).to(tl.int64)
    root = tl.where(highest < 0, r, r - highest)
    left = tl.where(highest < 0, ancestors, ancestors & ~(tl.full([], 1, tl.int64) << tl.maximum(highest, 0)))
    found, behind = r, root
    for _ in tl.static_range(BACK):
        top = tl.max(tl.where((left >> bits) & 1 == 1, bits, -1), 0).to(tl.int64)
        behind = tl.where(top < 0, behind - 1, behind)
        found = tl.where(top < 0, behind, root + top)
        left = tl.where(top < 0, left, left & ~(tl.full([], 1, tl.int64) << tl.maximum(top, 0)))
    return found


@triton.jit
def given(x, row, column, inside, n, GATED: tl.constexpr):
    """What a row of the batch gives to the convolution, in f32."""
    if GATED:
        at = x + row * (3 * n) + column
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        return gate * tl.load(at + 2 * n, mask=inside, other=0.0).to(tl.float32)
    return tl.load(x + row * n + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def convolution_kernel(out, x, slots, keys, values, cu_q, context, tables, tree, weight, bias, sequences, max_blocks,
                       block_step, n, TAPS: tl.constexpr, SIZE: tl.constexpr, GATED: tl.constexpr,
                       ACTIVE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Rows u stored and convolved: `causal_conv`. Grid: (rows, tiles of BLOCK of n channels)."""
    r = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    low, high = sequences * 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        here = tl.load(cu_q + middle) <= r
        low = tl.where(here, middle, low)
        high = tl.where(here, high, middle)
    begin, end = tl.load(cu_q + low).to(tl.int64), tl.load(cu_q + low + 1).to(tl.int64)
    used = (column < n) & (r >= begin) & (r < end)  # others only fill the step
    first = column < n // 2
    at_half = tl.where(first, column, column - n // 2)
    slot = tl.load(slots + r)
    kept = given(x, r, column, used, n, GATED).to(keys.dtype.element_ty)
    to = slot // SIZE * block_step + slot % SIZE * (n // 2) + at_half
    tl.store(keys + to, kept, mask=used & first & (slot >= 0))
    tl.store(values + to, kept, mask=used & ~first & (slot >= 0))
    total = tl.zeros([BLOCK], tl.float32)
    if bias is not None:
        total += tl.load(bias + column, mask=used, other=0.0)
    for k in tl.static_range(TAPS):
        if k + 1 == TAPS:
            u = kept.to(tl.float32)
        else:
            row = r - (TAPS - 1 - k)
            if tree is not None:
                row = row_before(r, tl.load(tree + r), TAPS - 1 - k)
            here = row >= begin
            position = tl.load(context + low) - end + row
            behind = used & ~here & (position >= 0)
            block = tl.load(tables + low * max_blocks + position // SIZE, mask=~here & (position >= 0), other=0)
            at = block.to(tl.int64) * block_step + position % SIZE * (n // 2) + at_half
            u = given(x, row, column, used & here, n, GATED).to(keys.dtype.element_ty).to(tl.float32)
            u += tl.load(keys + at, mask=behind & first, other=0.0).to(tl.float32)
            u += tl.load(values + at, mask=behind & ~first, other=0.0).to(tl.float32)
        total += tl.load(weight + k * n + column, mask=used, other=0.0) * u
    if ACTIVE:
        total = activate(total, SILU)
    if GATED:
        total *= tl.load(x + r * (3 * n) + n + column, mask=used, other=0.0).to(tl.float32)
    tl.store(out + r * n + column, tl.where(used, total, 0.0), mask=column < n)
