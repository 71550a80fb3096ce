"""Ops of a mixture of experts (Shazeer et al. 2017), with their cases.

A router scores every expert for a token and the best `top_k` run. The pairs (token, choice) are sorted by expert, so
that an expert's rows lie together and no row is padded; P = T * top_k pairs, whatever the router says. Every expert's
product goes through the `linear` of its weight format, and a token's expert outputs are summed in the order of its
choices: its result does not depend on the batch.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.experts import Choices, ExpertActivation, Grouped, Routing
from quire.ops.op import op
from quire.ops.reference.layers import gated_activation, linear
from quire.ops.weights import Packed, Weight, plain_packed

LEAST_SUM = 1e-20
"""Added to the sum that renormalized weights are divided by, as in transformers: sigmoids of a row may all be 0."""


def rows_of(w: Weight, rows: slice) -> Weight:
    """Some rows of a matrix in any format."""
    parts = {f.name: getattr(w, f.name) for f in fields(w)}
    taken: dict[str, Any] = {name: t[rows] for name, t in parts.items() if isinstance(t, Tensor) and t.dim() == 2}
    return replace(w, **taken)


def one_expert(w: Grouped, expert: int) -> Packed:
    """The matrix of one expert in plain form."""
    assert w.packed.plain is not None
    start = expert * (w.packed.n // w.experts)
    return plain_packed(rows_of(w.packed.plain, slice(start, start + w.n)))


def pick(scores: Tensor, count: int) -> Tensor:
    """Indices [T, count] of the largest of scores [T, n], best first; of equal ones the lower index."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


def _sparsemixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    left, ids, weights = logits, [], []
    for _ in range(2):
        best = pick(left, 1)
        top = left.gather(1, best)
        far = (top - logits) / torch.maximum(logits.abs(), top) > 2 * jitter
        ids.append(best)
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, best))
        left = left.scatter(1, best, -torch.inf)
    return torch.cat(ids, 1), torch.cat(weights, 1)


@op(tolerance=2e-6)
def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Experts int32 [T, top_k], best first, and their weights f32 [T, top_k] from router logits [T, experts] f32.

    `bias` [experts] f32 is added to what chooses, scores or for "late_sigmoid" logits, not to what weighs
    (DeepSeek-V3). Ties go to the lower expert. Weights of scores that are all 0 are 0.
    """
    if routing.score == "sparsemixer":
        ids, weights = _sparsemixer(logits, routing.jitter)
        return ids.int(), weights
    scores = _scores(logits, routing.score)
    choice = logits if routing.score == "late_sigmoid" else scores
    choice = choice if bias is None else choice + bias
    if routing.groups > 1:
        grouped = choice.view(len(choice), routing.groups, routing.experts // routing.groups)
        best = grouped.sort(-1, descending=True).values[..., : routing.group_best].sum(-1)
        out = torch.ones_like(best, dtype=torch.bool).scatter(1, pick(best, routing.top_groups), False)
        choice = grouped.masked_fill(out[..., None], -torch.inf).flatten(1)
    ids = pick(choice, routing.top_k)
    weights = scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    return ids.int(), weights * routing.scale


def _scores(logits: Tensor, kind: str) -> Tensor:
    if kind == "sqrtsoftplus":
        return F.softplus(logits).sqrt()
    return logits.softmax(-1) if kind == "softmax" else logits.sigmoid()


@op(tolerance=2e-6)
def route_by_token(logits: Tensor, tokens: Tensor, table: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Experts int32 [T, top_k] that `table` [V, top_k] int32 has of each of `tokens` [T] int32, and their weights f32
    (hash layers, Roller et al. 2021): scores of logits [T, experts] f32, "sigmoid" or "sqrtsoftplus", as of `route`."""
    ids = table[tokens.long()]
    weights = _scores(logits, routing.score).gather(1, ids.long())
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    return ids.int(), weights * routing.scale


@op(tolerance=0.0)
def scale_choices(weights: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
    """weights [T, top_k] f32 of experts ids [T, top_k] int32, each times its expert's of scales [experts] f32."""
    return weights * scales[ids.long()]


@op(tolerance=0.0)
def sort_by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order the pairs of ids [T, top_k] int32 by expert, those of one expert by token and choice.

    Returns int32 (tokens [T, top_k]: token of the i-th pair in that order; places [T, top_k]: where the pair of a token
    and choice lies; offsets [1, experts + 1]: expert e has the pairs offsets[e]..offsets[e + 1]).
    """
    order = torch.sort(ids.flatten(), stable=True).indices
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    counts = torch.bincount(ids.flatten(), minlength=experts)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    tokens = order // ids.shape[1]
    return tokens.view(ids.shape).int(), places.view(ids.shape).int(), offsets[None].int()


@op(tolerance=2e-5)
def grouped_linear(x: Tensor, w: Grouped, tokens: Tensor | None, offsets: Tensor) -> Tensor:
    """`linear` of each pair with its expert's matrix and bias: f32 [P, n] in the order of `sort_by_expert`.

    x [T, k] f32 with `tokens` int32 (P in all), which row each pair reads; or x [P, k] in that order, without.
    """
    rows = x if tokens is None else x[tokens.flatten().long()]
    ends, parts = offsets[0].tolist(), [rows.new_zeros((0, w.n))]
    for e in range(w.experts):
        if ends[e] < ends[e + 1]:
            bias = None if w.bias is None else w.bias[e]
            parts.append(linear(rows[ends[e] : ends[e + 1]], one_expert(w, e), bias))
    return torch.cat((*parts, rows.new_zeros((len(rows) - ends[-1], w.n))))


@op(tolerance=2e-2)
def expert_mlp(x: Tensor, gate_up: Grouped, down: Grouped, between: ExpertActivation, choices: Choices) -> Tensor:
    """Sum over a row's choices of weight * down(act(gate(x)) * up(x)) by the choice's expert: [R, hidden] f32.

    `grouped_linear`, `gated_activation` or `clamped_swiglu`, `grouped_linear`, `combine`. Rows [T, hidden] f32 of
    x are those that tokens [R, top_k] name; `gate_up` of 2 f rows an expert, `down` of f columns. The tolerance is that
    of one code, as `gated_mlp` has it.
    """
    tokens, places, offsets, weights = choices
    wide = grouped_linear(x, gate_up, tokens, offsets)
    inner = clamped_swiglu(wide, *between.clamp) if between.clamp else gated_activation(wide, between.kind)
    return combine(grouped_linear(inner, down, None, offsets), places, weights)


@op(tolerance=2e-6)
def combine(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Sum over choices c, ascending, of weights[t, c] * y[places[t, c]]: y [P, d] f32 -> [T, d] f32.

    A choice of weight 0 adds nothing, whatever lies at its place: nobody need have computed that.
    """
    parts = y[places.long()] * weights[..., None]
    return parts.masked_fill(weights[..., None] == 0, 0.0).sum(1)


@op(tolerance=2e-6)
def clamped_swiglu(
    gate_up: Tensor, alpha: float, limit: float, shift: float = 1.0, most: float | None = None
) -> Tensor:
    """(up + shift) * gate * sigmoid(alpha * gate) of gate_up [T, 2 f] = [gate; up]: f32 [T, f] (gpt-oss).

    Gates are limited to at most `most`, None: `limit`; up to [-limit, limit].
    """
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=limit if most is None else most), up.clamp(-limit, limit)
    return (up + shift) * gate * torch.sigmoid(alpha * gate)


@op(tolerance=2e-6, into="x")
def scale_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, d] f32 *= sigmoid(gate [T, 1] f32) in place; returns x (Qwen2-MoE's shared expert)."""
    return x * gate.sigmoid()


@op(tolerance=2e-6, into="x")
def scale_by_softplus(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, d] f32 times softplus(gate [T, n] f32) in place, each of n equal runs of columns by its own number; returns
    x (Laguna's heads)."""
    return (x.view(len(x), gate.shape[1], x.shape[1] // gate.shape[1]) * F.softplus(gate)[..., None]).flatten(1)
