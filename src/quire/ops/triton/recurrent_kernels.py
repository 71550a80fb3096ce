"""Layers with a recurrent state on the GPU: rows one after the other over a tile of the state, kept in registers.

A program is a sequence, a head and some columns of the state; columns do not meet. A tile has all numbers of a key, so
sums have one order, whatever else is in the batch. Everything is f32 between load and store.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + e^x) to f32's precision: beyond max(x, 0) it is 2 artanh(u / (2 + u)) of u = e^-|x|, by its series."""
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    z = s * s
    p = 1.0 / 13.0 + z * (1.0 / 15.0)
    p = 1.0 / 9.0 + z * (1.0 / 11.0 + z * p)
    p = 1.0 / 5.0 + z * (1.0 / 7.0 + z * p)
    p = 1.0 + z * (1.0 / 3.0 + z * p)
    return tl.where(x < 0, 0.0, x) + 2.0 * s * p


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)"""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def keep(states, state, at, inside, count, wanted, slot, slots, step):
    """Store the tile after `count` rows, if that is when it is `wanted`, in a slot that is there."""
    known = (slot >= 0) & (slot < slots) & (wanted == count)
    tl.store(states + slot.to(tl.int64) * step + at, state, mask=inside & known)


@triton.jit
def unit(x, at, inside, scale):
    """Numbers x[at] divided by their length, times `scale`."""
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    return row * (tl.rsqrt(tl.sum(row * row, 0) + 1e-6) * scale)


@triton.jit
def log_decay(x, a, lower, BOUNDED: tl.constexpr):
    """The logarithm of a decay; `lower` bounds it."""
    return lower * sigmoid(-a * x) if BOUNDED else a * softplus(x)


@triton.jit(do_not_specialize=["slots", "rows"])
def delta_kernel(out, qkv, gates, decay, states, cu_q, source, counts, target, a, bias, key_heads, value_heads, dk, dv,
                 slots, step, rows, scale, lower, factor, BK: tl.constexpr, BV: tl.constexpr,
                 BOUNDED: tl.constexpr):  # fmt: skip
    """The gated delta rule; `decay` of channels may be None. Grid: (sequences, value heads, dv / BV)."""
    s, head = tl.program_id(0), tl.program_id(1)
    i, column = tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    keys, values = i < dk, column < dv
    inside = keys[:, None] & values[None, :]
    at = (head * dk + i)[:, None] * dv + column[None, :]
    first, end = tl.maximum(tl.load(cu_q + s), 0), tl.minimum(tl.load(cu_q + s + 1), rows)
    slot = tl.load(source + s)
    count0, count1 = tl.load(counts + 2 * s), tl.load(counts + 2 * s + 1)
    slot0, slot1 = tl.load(target + 2 * s), tl.load(target + 2 * s + 1)
    known = (slot >= 0) & (slot < slots)
    state = tl.load(states + slot.to(tl.int64) * step + at, mask=inside & known, other=0.0)
    keep(states, state, at, inside, 0, count0, slot0, slots, step)
    keep(states, state, at, inside, 0, count1, slot1, slots, step)
    key = head // (value_heads // key_heads) * dk + i
    rate = tl.load(a + head)
    width = 2 * key_heads * dk + value_heads * dv
    gate_width = 2 * value_heads if decay is None else value_heads
    for taken in range(end - first):
        row = (first + taken).to(tl.int64)
        x = qkv + row * width
        q, k = unit(x, key, keys, scale), unit(x, key_heads * dk + key, keys, 1.0)
        v = tl.load(x + 2 * key_heads * dk + head * dv + column, mask=values, other=0.0).to(tl.float32)
        gate = gates + row * gate_width + head
        beta = factor * sigmoid(tl.load(gate).to(tl.float32))
        if decay is None:
            given = tl.load(gate + value_heads).to(tl.float32) + tl.load(bias + head)
            state = state * tl.exp(log_decay(given, rate, lower, BOUNDED))
        else:
            channel = head * dk + i
            given = tl.load(decay + row * value_heads * dk + channel, mask=keys, other=0.0).to(tl.float32)
            given += tl.load(bias + channel, mask=keys, other=0.0)
            state = state * tl.exp(log_decay(given, rate, lower, BOUNDED))[:, None]
        d = beta * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * d[None, :]
        o = tl.sum(state * q[:, None], 0)
        tl.store(out + row * value_heads * dv + head * dv + column, o, mask=values)
        keep(states, state, at, inside, taken + 1, count0, slot0, slots, step)
        keep(states, state, at, inside, taken + 1, count1, slot1, slots, step)


@triton.jit(do_not_specialize=["slots", "rows"])
def scan_kernel(out, x, bc, dt, states, cu_q, source, counts, target, a, skip, bias, heads, groups, n, p, slots, step,
                rows, x_width, bc_width, low, high, BN: tl.constexpr, BP: tl.constexpr,
                SELECTIVE: tl.constexpr):  # fmt: skip
    """A selective scan: Mamba-1 if SELECTIVE, else Mamba-2; `skip` and `bias` may be None, and `dt`: steps are 1.

    Grid: (sequences, heads, p / BP).
    """
    s, head = tl.program_id(0), tl.program_id(1)
    i, column = tl.arange(0, BN), tl.program_id(2) * BP + tl.arange(0, BP)
    numbers, channels = i < n, column < p
    inside = numbers[:, None] & channels[None, :]
    at = (head * n + i)[:, None] * p + column[None, :]
    first, end = tl.maximum(tl.load(cu_q + s), 0), tl.minimum(tl.load(cu_q + s + 1), rows)
    slot = tl.load(source + s)
    count0, count1 = tl.load(counts + 2 * s), tl.load(counts + 2 * s + 1)
    slot0, slot1 = tl.load(target + 2 * s), tl.load(target + 2 * s + 1)
    known = (slot >= 0) & (slot < slots)
    state = tl.load(states + slot.to(tl.int64) * step + at, mask=inside & known, other=0.0)
    keep(states, state, at, inside, 0, count0, slot0, slots, step)
    keep(states, state, at, inside, 0, count1, slot1, slots, step)
    group = head // (heads // groups) * n + i
    own = column if SELECTIVE else column * 0 + head
    if SELECTIVE:
        rate = tl.load(a + i[:, None] * p + column[None, :], mask=inside, other=0.0)
    else:
        rate = tl.load(a + own, mask=channels, other=0.0)[None, :]
    for taken in range(end - first):
        row = (first + taken).to(tl.int64)
        value = tl.load(x + row * x_width + head * p + column, mask=channels, other=0.0).to(tl.float32)
        b = tl.load(bc + row * bc_width + group, mask=numbers, other=0.0).to(tl.float32)
        c = tl.load(bc + row * bc_width + groups * n + group, mask=numbers, other=0.0).to(tl.float32)
        if dt is None:
            given = tl.full((BP,), 1.0, tl.float32)
        else:
            given = tl.load(dt + row * (p if SELECTIVE else heads) + own, mask=channels, other=0.0)
            given = given.to(tl.float32)
            if bias is not None:
                given += tl.load(bias + own, mask=channels, other=0.0)
            given = softplus(given)
            given = tl.where(given < low, low, given)
            given = tl.where(given > high, high, given)
        state = state * tl.exp(rate * given[None, :]) + b[:, None] * (given * value)[None, :]
        y = tl.sum(state * c[:, None], 0)
        if skip is not None:
            y += tl.load(skip + own, mask=channels, other=0.0) * value
        tl.store(out + row * heads * p + head * p + column, y, mask=channels)
        keep(states, state, at, inside, taken + 1, count0, slot0, slots, step)
        keep(states, state, at, inside, taken + 1, count1, slot1, slots, step)


@triton.jit
def gated_norm_kernel(x, z, weight, width, z_step, runs, span, weights, eps, BR: tl.constexpr, BS: tl.constexpr,
                      SIGMOID: tl.constexpr, GATE_FIRST: tl.constexpr):  # fmt: skip
    """x *= gate(z), and a norm of `runs` runs of `span` columns before or behind it. Grid: (rows, runs / BR).

    No norm where `weight` is None; it has `weights` numbers, those of a run or of a row.
    """
    run = tl.program_id(1) * BR + tl.arange(0, BR)
    column = tl.arange(0, BS)
    inside = (run < runs)[:, None] & (column < span)[None, :]
    of = run[:, None] * span + column[None, :]
    at = tl.program_id(0).to(tl.int64) * width + of
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + tl.program_id(0).to(tl.int64) * z_step + of, mask=inside, other=0.0).to(tl.float32)
    factor = sigmoid(gate) if SIGMOID else gate * sigmoid(gate)
    if GATE_FIRST:
        row = row * factor
    if weight is not None:
        row = row * tl.rsqrt(tl.sum(row * row, 1) / span + eps)[:, None]
        row = row * tl.load(weight + of % weights, mask=inside, other=0.0)
    if not GATE_FIRST:
        row = row * factor
    tl.store(x + at, row, mask=inside)
