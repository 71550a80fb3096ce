"""Row by row on the GPU: norms, activations, positions, adapters. Everything is f32 between load and store.

A row is reduced by one program over one block of columns whose size depends on the row's length alone, so its bits do
not depend on the batch. These ops move bytes: the residual addition is fused into the norm, the two halves of a gated
activation into their product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.attention_kernels import tanh

SILU, GELU, GELU_TANH, RELU, RELU2 = (tl.constexpr(i) for i in range(5))
"""Numbers of the activations."""
SCALE, SOFTCAP, CLIP = (tl.constexpr(i) for i in range(3))
"""What `change_kernel` does to a number."""


@triton.jit
def activate(x, KIND: tl.constexpr):
    """The activation of number KIND of f32 x."""
    if KIND == SILU:
        return x / (1.0 + tl.exp(-x))
    if KIND == GELU:
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    if KIND == GELU_TANH:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    positive = tl.where(x < 0, 0.0, x)
    return positive * positive if KIND == RELU2 else positive


@triton.jit
def norm_kernel(out, x, delta, weight, bias, d, eps, BD: tl.constexpr, CENTERED: tl.constexpr):
    """out = norm(x += delta) * weight + bias of rows [d]; delta and bias may be None. Grid: (rows,)."""
    column = tl.arange(0, BD)
    inside = column < d
    at = tl.program_id(0).to(tl.int64) * d + column
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        total = (row + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + at, total, mask=inside)
        row = total.to(tl.float32)
    if CENTERED:
        row = tl.where(inside, row - tl.sum(row, 0) / d, 0.0)
    row = row * tl.rsqrt(tl.sum(row * row, 0) / d + eps)
    row = row * tl.load(weight + column, mask=inside, other=0.0)
    if bias is not None:
        row += tl.load(bias + column, mask=inside, other=0.0)
    tl.store(out + at, row, mask=inside)


@triton.jit
def spans_kernel(x, weight, width, start, runs, span, eps, BR: tl.constexpr, BS: tl.constexpr,
                 CENTERED: tl.constexpr):  # fmt: skip
    """Norm in place of `runs` runs of `span` columns from `start` on. Grid: (rows, runs / BR)."""
    run = tl.program_id(1) * BR + tl.arange(0, BR)
    column = tl.arange(0, BS)
    inside = (run < runs)[:, None] & (column < span)[None, :]
    of = run[:, None] * span + column[None, :]
    at = tl.program_id(0).to(tl.int64) * width + start + of
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        row = tl.where(inside, row - (tl.sum(row, 1) / span)[:, None], 0.0)
    row = row * tl.rsqrt(tl.sum(row * row, 1) / span + eps)[:, None]
    tl.store(x + at, row * tl.load(weight + of, mask=inside, other=0.0), mask=inside)


@triton.jit
def gated_kernel(out, gate_up, f, BF: tl.constexpr, KIND: tl.constexpr):
    """act(gate) * up of rows [gate; up]. Grid: (rows, f / BF)."""
    column = tl.program_id(1) * BF + tl.arange(0, BF)
    inside = column < f
    row = tl.program_id(0).to(tl.int64)
    gate = tl.load(gate_up + row * 2 * f + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * f + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * f + column, activate(gate, KIND) * up, mask=inside)


@triton.jit
def activation_kernel(out, x, d, BD: tl.constexpr, KIND: tl.constexpr):
    """act(x) of rows [d]. Grid: (rows, d / BD)."""
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    at, inside = tl.program_id(0).to(tl.int64) * d + column, column < d
    tl.store(out + at, activate(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), KIND), mask=inside)


@triton.jit
def change_kernel(x, d, number, BD: tl.constexpr, KIND: tl.constexpr):
    """Rows [d] in place: times `number`, capped by it softly, or limited to it; NaN stays. Grid: (rows, d / BD)."""
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    at, inside = tl.program_id(0).to(tl.int64) * d + column, column < d
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == SCALE:
        value = value * number
    elif KIND == SOFTCAP:
        value = tanh(value / number) * number
    else:
        value = tl.where(value > number, number, tl.where(value < -number, -number, value))
    tl.store(x + at, value, mask=inside)


@triton.jit
def xielu_kernel(x, d, positive, negative, beta, BD: tl.constexpr):
    """Rows [d] in place: positive x^2, or negative (exp(x) - 1 - x) below 0, each with beta x. Grid: (rows, d / BD)."""
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    at, inside = tl.program_id(0).to(tl.int64) * d + column, column < d
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    low = tl.where(value < 0, value, 0.0)
    curved = tl.where(value > 0, positive * value * value, negative * (tl.exp(low) - 1.0 - low))
    tl.store(x + at, curved + beta * value, mask=inside)


@triton.jit
def scale_rows_kernel(x, factors, positions, columns, d, entries, step, ahead, BD: tl.constexpr):
    """The first `columns` of rows [d] in place times a factor of the row; NaN where there is none. Grid: (rows,
    columns / BD)."""
    row = tl.program_id(0).to(tl.int64)
    place = row
    if positions is not None:
        place = (tl.load(positions + row).to(tl.int64) + ahead) // step
    factor = tl.load(factors + place, mask=(place >= 0) & (place < entries), other=float("nan"))
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    at, inside = x + row * d + column, column < columns
    tl.store(at, tl.load(at, mask=inside, other=0.0).to(tl.float32) * factor, mask=inside)


@triton.jit
def embedding_kernel(out, numbers, table, d, offset, vocabulary, other, BD: tl.constexpr, ADD: tl.constexpr):
    """Rows of `table` [vocabulary, d] at numbers + offset, stored or added to `out`. Grid: (rows, d / BD).

    A number outside the table gives `other`: nothing is read there. With NaN the row is not served.
    """
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = column < d
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(numbers + row).to(tl.int64) + offset
    known = (number >= 0) & (number < vocabulary)
    found = tl.load(table + number * d + column, mask=inside & known, other=other).to(tl.float32)
    at = out + row * d + column
    if ADD:
        found += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, found, mask=inside)


@triton.jit
def take_kernel(out, x, delta, rows, d, BD: tl.constexpr):
    """(x + delta)[rows]. Grid: (rows taken, d / BD)."""
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = column < d
    at = tl.load(rows + tl.program_id(0)).to(tl.int64) * d + column
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0).to(tl.int64) * d + column, total, mask=inside)


@triton.jit
def add_kernel(x, delta, d, BD: tl.constexpr):
    """x += delta of rows [d]. Grid: (rows, d / BD)."""
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    at, inside = tl.program_id(0).to(tl.int64) * d + column, column < d
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + at, total + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32), mask=inside)


@triton.jit
def place_kernel(out, part, d, width, start, BD: tl.constexpr):
    """Columns [d] of `part` as columns start.. of `out` [width]. Grid: (rows, d / BD)."""
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.load(part + row * d + column, mask=column < d)
    tl.store(out + row * width + start + column, numbers, mask=column < d)


@triton.jit
def any_of(slots, slot):
    """Whether a tile of rows has one of this adapter."""
    return tl.max((slots == slot).to(tl.int32), 0) != 0


@triton.jit(do_not_specialize=["count"])
def shrink_kernel(h, x, a, slots_of, count, k, rank, slots, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    """h [count, rank] f32 = x [count, k] times the rows' adapters a [slots, rank, k]. Grid: (count / BM,).

    As SGMV (Punica, Chen et al. 2024) without sorting: a tile of rows goes through the adapters that occur in it.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    r, column = tl.arange(0, BR), tl.arange(0, BK)
    own = tl.load(slots_of + row, mask=row < count, other=-1)
    total = tl.zeros([BM, BR], tl.float32)
    for slot in range(slots):
        if any_of(own, slot):
            part = tl.zeros([BM, BR], tl.float32)
            for first in range(0, k, BK):
                inside = first + column < k
                rows = tl.load(x + row.to(tl.int64)[:, None] * k + first + column[None, :],
                               mask=(row < count)[:, None] & inside[None, :], other=0.0).to(tl.float32)  # fmt: skip
                matrix = tl.load(a + (slot * rank + r).to(tl.int64)[None, :] * k + first + column[:, None],
                                 mask=(r < rank)[None, :] & inside[:, None], other=0.0).to(tl.float32)  # fmt: skip
                part = tl.dot(rows, matrix, part, input_precision=PRECISION)
            total = tl.where((own == slot)[:, None], part, total)
    tl.store(h + row[:, None] * rank + r[None, :], total, mask=(row < count)[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["count"])
def expand_kernel(y, h, b, slots_of, count, n, rank, width, start, slots, BM: tl.constexpr, BR: tl.constexpr,
                  BN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """y[:, start:start + n] += h times the rows' adapters b [slots, rank, n]. Grid: (count / BM, n / BN)."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    r = tl.arange(0, BR)
    own = tl.load(slots_of + row, mask=row < count, other=-1)
    known = (row < count)[:, None] & (r < rank)[None, :]
    inner = tl.load(h + row[:, None] * rank + r[None, :], mask=known, other=0.0).to(tl.float32)
    total = tl.zeros([BM, BN], tl.float32)
    for slot in range(slots):
        if any_of(own, slot):
            matrix = tl.load(b + (slot * rank + r).to(tl.int64)[:, None] * n + column[None, :],
                             mask=(r < rank)[:, None] & (column < n)[None, :], other=0.0).to(tl.float32)  # fmt: skip
            part = tl.dot(inner, matrix, input_precision=PRECISION)
            total = tl.where((own == slot)[:, None], part, total)
    at = y + row.to(tl.int64)[:, None] * width + start + column[None, :]
    inside = ((row < count) & (own >= 0) & (own < slots))[:, None] & (column < n)[None, :]
    tl.store(at, tl.load(at, mask=inside, other=0.0).to(tl.float32) + total, mask=inside)


@triton.jit
def slot_scale_kernel(y, excess, slots_of, n, slots, BD: tl.constexpr):
    """y [count, n] *= 1 + the rows' adapters' excess [slots, n], in place. Grid: (count, n / BD)."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    slot = tl.load(slots_of + row)
    at, inside = row.to(tl.int64) * n + column, (column < n) & (slot >= 0) & (slot < slots)
    factor = 1.0 + tl.load(excess + slot.to(tl.int64) * n + column, mask=inside, other=0.0)
    tl.store(y + at, tl.load(y + at, mask=inside, other=0.0).to(tl.float32) * factor, mask=inside)
