"""Triton kernels of a mixture of experts: routing, sorting pairs by expert, summing what experts gave."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.interpreter import repair
from quire.ops.triton.recurrent_kernels import softplus

repair()

SOFTMAX, SPARSEMIXER, LATE_SIGMOID = tl.constexpr(0), tl.constexpr(2), tl.constexpr(3)
SQRT_SOFTPLUS = tl.constexpr(4)


@triton.jit
def _best(values, places):
    """(largest of values, the lowest place that has it)."""
    top = tl.max(values, 0)
    return top, tl.min(tl.where(values == top, places, 1 << 30), 0)


@triton.jit
def _mix_two(logits, places, ids, weights, row, experts, jitter):
    """Two experts, each weighed by a softmax over the logits near the best of those left (Liu et al. 2023)."""
    left = logits
    for choice in tl.static_range(2):
        top, best = _best(left, places)
        far = tl.math.div_rn(top - logits, tl.maximum(tl.abs(logits), top)) > 2 * jitter
        mass = tl.sum(tl.where(far, 0.0, tl.exp(left - top)), 0)
        best = tl.minimum(best, experts - 1)
        tl.store(ids + row * 2 + choice, best)
        tl.store(weights + row * 2 + choice, 1.0 / mass)
        left = tl.where(places == best, float("-inf"), left)


@triton.jit
def _limit_groups(choice, groups: tl.constexpr, top_groups, group_best, SLOTS: tl.constexpr, SIZE: tl.constexpr):
    """`choice` [SLOTS * SIZE] with -inf outside the groups of the largest sums of their `group_best` best."""
    left = tl.reshape(choice, (SLOTS, SIZE))
    member, group = tl.arange(0, SIZE)[None, :], tl.arange(0, SLOTS)
    total = tl.where(group < groups, 0.0, float("-inf"))
    for _ in range(group_best):
        top = tl.max(left, 1)
        first = tl.min(tl.where(left == top[:, None], member, 1 << 30), 1)
        total += top
        left = tl.where(member == first[:, None], float("-inf"), left)
    kept = tl.zeros((SLOTS,), tl.int32)
    for _ in range(top_groups):
        _, best = _best(tl.where(kept == 1, float("-inf"), total), group)
        kept = tl.where(group == best, 1, kept)
    wide = tl.broadcast_to(kept[:, None], (SLOTS, SIZE))
    return tl.where(tl.reshape(wide, (SLOTS * SIZE,)) == 1, choice, float("-inf"))


@triton.jit
def route_kernel(
    ids, weights, logits, bias, experts, top_k, top_groups, group_best, scale, jitter, SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    """A program per row of logits [T, experts]: its best `top_k` experts, and their weights.

    Experts lie in SLOTS x SIZE places, GROUPS and experts / GROUPS of which are in use; PICKS >= top_k. Of equal scores
    the lower expert is taken.
    """
    row = tl.program_id(0).to(tl.int64)
    places, per = tl.arange(0, SLOTS * SIZE), experts // GROUPS
    number, there = places // SIZE * per + places % SIZE, (places % SIZE < per) & (places // SIZE < GROUPS)
    x = tl.load(logits + row * experts + number, mask=there, other=float("-inf")).to(tl.float32)
    if SCORE == SPARSEMIXER:
        _mix_two(x, number, ids, weights, row, experts, jitter)
        return
    if SCORE == SOFTMAX:
        powers = tl.exp(x - tl.max(x, 0))
        scores = tl.math.div_rn(powers, tl.zeros_like(powers) + tl.sum(powers, 0))
    elif SCORE == SQRT_SOFTPLUS:
        scores = tl.math.sqrt_rn(tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0)))))
    else:
        scores = tl.math.div_rn(tl.full((SLOTS * SIZE,), 1.0, tl.float32), 1.0 + tl.exp(-x))
    choice = x if SCORE == LATE_SIGMOID else scores
    if bias is not None:
        choice += tl.load(bias + number, mask=there, other=0.0)
    choice = tl.where(there, choice, float("-inf"))
    if GROUPS > 1:
        choice = _limit_groups(choice, GROUPS, top_groups, group_best, SLOTS, SIZE)
    taken = tl.zeros((SLOTS * SIZE,), tl.int32)
    picks = tl.arange(0, PICKS)
    chosen, weighs = tl.zeros((PICKS,), tl.int32), tl.zeros((PICKS,), tl.float32)
    for i in range(top_k):
        top = tl.max(tl.where(taken == 1, float("-inf"), choice), 0)
        free = there & (taken == 0) & (choice == top)
        best = tl.minimum(tl.min(tl.where(free, number, 1 << 30), 0), experts - 1)  # none is free in a row of NaN
        weigh = tl.sum(tl.where(there & (number == best), scores, 0.0), 0)
        chosen, weighs = tl.where(picks == i, best, chosen), tl.where(picks == i, weigh, weighs)
        taken = tl.where(there & (number == best), 1, taken)
    if RENORMALIZE:
        weighs = tl.math.div_rn(weighs, tl.zeros_like(weighs) + (tl.sum(weighs, 0) + 1e-20))
    tl.store(ids + row * top_k + picks, chosen, mask=picks < top_k)
    tl.store(weights + row * top_k + picks, weighs * scale, mask=picks < top_k)


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(tokens, places, offsets, ids, pairs, top_k, BLOCK: tl.constexpr):
    """A program per expert, and one more: where its pairs begin, and which they are, in ascending order.

    It counts the pairs of lower experts itself, so that there is one kernel and no atomic operation.
    """
    expert, at = tl.program_id(0), tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        id = tl.load(ids + start + at, mask=start + at < pairs, other=1 << 30)
        lower += (id < expert).to(tl.int32)
    place = tl.sum(lower, 0)
    tl.store(offsets + expert, place)
    for start in range(0, pairs, BLOCK):
        id = tl.load(ids + start + at, mask=start + at < pairs, other=1 << 30)
        own = (id == expert).to(tl.int32)
        target = place + tl.cumsum(own, 0) - 1
        tl.store(tokens + target, (start + at) // top_k, mask=own == 1)
        tl.store(places + start + at, target, mask=own == 1)
        place += tl.sum(own, 0)


@triton.jit
def combine_kernel(out, y, places, weights, d, top_k, BLOCK: tl.constexpr):
    """out [T, d] = the sum over choices, ascending, of weights [T, top_k] times y [pairs, d] at places [T, top_k].

    Of a choice of weight 0 nothing is read.
    """
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for c in range(top_k):
        place = tl.load(places + row * top_k + c).to(tl.int64)
        weight = tl.load(weights + row * top_k + c)
        read = tl.where(weight != 0.0, d, 0)  # its interpreter joins no comparison of floats with one of integers
        part = tl.load(y + place * d + cols, mask=cols < read, other=0.0).to(tl.float32)
        total += part * weight
    tl.store(out + row * d + cols, total.to(out.dtype.element_ty), mask=cols < d)


@triton.jit
def swiglu_kernel(out, gate_up, f, alpha, limit, shift, most, BLOCK: tl.constexpr):
    """out [T, f] = (up + shift) * gate * sigmoid(alpha * gate), gate_up [T, 2 f] limited as `clamped_swiglu` says."""
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * f + cols, mask=cols < f, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * f + f + cols, mask=cols < f, other=0.0).to(tl.float32)
    gate = tl.where(gate > most, most, gate)  # and not a minimum, which would hide a NaN
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value = (up + shift) * gate * (1.0 / (1.0 + tl.exp(-alpha * gate)))
    tl.store(out + row * f + cols, value.to(out.dtype.element_ty), mask=cols < f)


@triton.jit
def sigmoid_kernel(x, gate, d, BLOCK: tl.constexpr):
    """x [T, d] *= sigmoid(gate [T])."""
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    factor = 1.0 / (1.0 + tl.exp(-tl.load(gate + row).to(tl.float32)))
    value = tl.load(x + row * d + cols, mask=cols < d, other=0.0).to(tl.float32) * factor
    tl.store(x + row * d + cols, value.to(x.dtype.element_ty), mask=cols < d)


@triton.jit
def softplus_kernel(x, gate, d, BLOCK: tl.constexpr):
    """x [spans, d] *= softplus(gate [spans])."""
    span, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    factor = softplus(tl.load(gate + span).to(tl.float32))
    value = tl.load(x + span * d + cols, mask=cols < d, other=0.0).to(tl.float32) * factor
    tl.store(x + span * d + cols, value.to(x.dtype.element_ty), mask=cols < d)
