"""The Triton backend's side of the ops of moe.py."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.experts import SCORES, Choices, ExpertActivation, Grouped, Routing
from quire.ops.op import impl
from quire.ops.reference import experts as definitions
from quire.ops.reference.layers import gated_activation
from quire.ops.triton import moe_kernels as kernels
from quire.ops.triton.gpu import Gpu
from quire.ops.triton.linear import check_rows, grouped_linear

BLOCK = 1024
"""Columns or pairs that a program takes at a time."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@impl("route", "triton")
def route(gpu: Gpu, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    rows, r = check_rows(logits, "route logits", routing.experts), routing
    ids, weights = gpu.empty(rows, r.top_k, dtype=torch.int32), gpu.empty(rows, r.top_k)
    if rows:
        kernels.route_kernel[rows,](
            ids, weights, logits, bias, r.experts, r.top_k, r.top_groups, r.group_best, r.scale, r.jitter,
            SCORE=SCORES.index(r.score), RENORMALIZE=r.renormalize, GROUPS=r.groups, SLOTS=power_of_two(r.groups),
            SIZE=power_of_two(r.experts // r.groups), PICKS=power_of_two(r.top_k),
            num_warps=min(max(r.experts // 64, 1), 4),
        )  # fmt: skip
    return ids, weights


@impl("route_by_token", "triton")
def route_by_token(gpu: Gpu, logits: Tensor, tokens: Tensor, table: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = definitions.route_by_token(logits.float(), tokens, table, routing)
    return found


@impl("scale_choices", "triton")
def scale_choices(gpu: Gpu, weights: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
    return weights * scales[ids.long()]


@impl("sort_by_expert", "triton")
def sort_by_expert(gpu: Gpu, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, places = torch.empty_like(ids), torch.empty_like(ids)
    offsets = gpu.empty(1, experts + 1, dtype=torch.int32)
    pairs, top_k = ids.numel(), ids.shape[1]
    kernels.sort_kernel[experts + 1,](tokens, places, offsets, ids, pairs, top_k, BLOCK)
    return tokens, places, offsets


@impl("combine", "triton")
def combine(gpu: Gpu, y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    (rows, top_k), d = places.shape, y.shape[1]
    out = gpu.empty(rows, d, dtype=y.dtype)
    if rows:
        kernels.combine_kernel[rows, -(-d // BLOCK)](out, y, places, weights, d, top_k, BLOCK)
    return out


@impl("clamped_swiglu", "triton")
def clamped_swiglu(
    gpu: Gpu, gate_up: Tensor, alpha: float, limit: float, shift: float = 1.0, most: float | None = None
) -> Tensor:
    rows, f = check_rows(gate_up, "clamped_swiglu gate_up", gate_up.shape[1]), gate_up.shape[1] // 2
    out = gpu.empty(rows, f, dtype=gate_up.dtype)
    if rows:
        most = limit if most is None else most
        kernels.swiglu_kernel[rows, -(-f // BLOCK)](out, gate_up, f, alpha, limit, shift, most, BLOCK)
    return out


@impl("scale_by_sigmoid", "triton")
def scale_by_sigmoid(gpu: Gpu, x: Tensor, gate: Tensor) -> Tensor:
    rows, d = check_rows(x, "scale_by_sigmoid x", x.shape[1]), x.shape[1]
    if rows:
        kernels.sigmoid_kernel[rows, -(-d // BLOCK)](x, gate, d, BLOCK)
    return x


@impl("scale_by_softplus", "triton")
def scale_by_softplus(gpu: Gpu, x: Tensor, gate: Tensor) -> Tensor:
    rows, d, runs = check_rows(x, "scale_by_softplus x", x.shape[1]), x.shape[1], gate.shape[1]
    if len(gate) != rows or not runs or d % runs:
        raise ValueError(f"scale_by_softplus: rows of {d} numbers are not {runs} runs of one length, or rows differ")
    if rows:
        size = min(power_of_two(d // runs), BLOCK)
        kernels.softplus_kernel[rows * runs, -(-(d // runs) // size)](x, gate, d // runs, size)
    return x


@impl("expert_mlp", "triton")
def expert_mlp(
    gpu: Gpu, x: Tensor, gate_up: Grouped, down: Grouped, between: ExpertActivation, choices: Choices
) -> Tensor:
    tokens, places, offsets, weights = choices
    wide = grouped_linear(gpu, x, gate_up, tokens, offsets)  # models call the ops themselves
    if between.clamp:
        inner = clamped_swiglu(gpu, wide, *between.clamp)
    else:
        inner = gated_activation(wide.float(), between.kind).to(wide.dtype)
    return combine(gpu, grouped_linear(gpu, inner, down, None, offsets), places, weights)
