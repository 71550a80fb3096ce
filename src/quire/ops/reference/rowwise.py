"""Ops on rows that some families need besides those of layers.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.op import op
from quire.ops.reference.layers import rmsnorm, rotated


@op(tolerance=4e-6)
def layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, rows of x [T, d] f32 (Ba et al. 2016)."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


@op(tolerance=4e-6, into="x")
def add_layernorm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its layernorm), all [T, d] f32. x is given up: the sum, the residual stream, may lie in its place."""
    x = x + delta
    return x, layernorm(x, weight, bias, eps)


@op(tolerance=4e-6, into="x")
def norm_spans(x: Tensor, weight: Tensor, start: int, span: int, centered: bool, eps: float) -> Tensor:
    """Norm each run of `span` columns from `start` on, len(weight) columns in all, in place; returns x [T, width] f32.

    `centered`: layernorm instead of rmsnorm. The span is a head, or all heads of a row; weights may differ from
    head to head.
    """
    end, ones = start + len(weight), torch.ones(span)
    runs = x[:, start:end].reshape(len(x), len(weight) // span, span)
    normed = (layernorm(runs, ones, None, eps) if centered else rmsnorm(runs, ones, eps)) * weight.view(-1, span)
    return torch.cat((x[:, :start], normed.flatten(1), x[:, end:]), 1)


@op(tolerance=0.0)
def join_columns(parts: tuple[Tensor, ...]) -> Tensor:
    """Matrices [T, d_i] f32 beside each other: [T, sum of d_i]."""
    return torch.cat(parts, 1)


@op(tolerance=0.0)
def take_columns(x: Tensor, start: int, width: int) -> Tensor:
    """x[:, start : start + width] of x [T, d] f32, copied: [T, width]."""
    return x[:, start : start + width].clone(memory_format=torch.contiguous_format)


@op(tolerance=0.0, into="out")
def place_columns(out: Tensor, x: Tensor, at: int) -> Tensor:
    """out[:T, at : at + d] = x [T, d] f32, the rest of out [N, width] f32 as it is; returns out.

    Rows of x may lie apart: it may be some columns of a matrix.
    What a step leaves at a fixed address for who reads it after the step.
    """
    rows = torch.cat((out[: len(x), :at], x, out[: len(x), at + x.shape[1] :]), 1)
    return torch.cat((rows, out[len(x) :]))


@op(tolerance=0.0, into="x")
def add(x: Tensor, delta: Tensor) -> Tensor:
    """x += delta in place, both [T, d] f32; returns x."""
    return x + delta


@op(tolerance=0.0, into="x")
def add_positions(x: Tensor, positions: Tensor, table: Tensor, offset: int) -> Tensor:
    """x [T, d] f32 += table[positions + offset] in place, table [P, d] f32, bf16, f16: learned positions; returns x."""
    return x + table[positions.long() + offset].float()


@op(tolerance=0.0, into="x")
def scale(x: Tensor, factor: float) -> Tensor:
    """x *= factor in place; returns x [T, d] f32."""
    return x * factor


@op(tolerance=0.0, into="x")
def scale_rows(
    x: Tensor, factors: Tensor, columns: int, positions: Tensor | None = None, step: int = 1, ahead: int = 0
) -> Tensor:
    """x[t, :columns] *= factors[t] in place, or with `positions` int32 [T] factors[(positions[t] + ahead) // step].

    x [T, d] f32; factors f32 [T], or of any length with `positions`; returns x.
    """
    at = torch.arange(len(x)) if positions is None else (positions.long() + ahead) // step
    scaled = x[:, :columns] * factors[at][:, None]
    return torch.cat((scaled, x[:, columns:]), 1)


@op(tolerance=2e-6, into="x")
def softcap(x: Tensor, cap: float) -> Tensor:
    """x = cap * tanh(x / cap) in place; returns x [T, d] f32 (Gemma 2's output)."""
    return torch.tanh(x / cap) * cap


@op(tolerance=0.0, into="x")
def clip(x: Tensor, limit: float) -> Tensor:
    """x limited to [-limit, limit] in place; returns x [T, d] f32 (OLMo's and MPT's queries, keys and values)."""
    return x.clamp(-limit, limit)


@op(tolerance=4e-6, into="x")
def xielu(x: Tensor, positive: float, negative: float, beta: float) -> Tensor:
    """x [T, d] f32 in place: positive * x^2 + beta * x above 0, negative * (exp(x) - 1 - x) + beta * x below it.

    Returns x (Huang and Schlag 2024).
    """
    low = x.clamp(max=0.0)
    return torch.where(x > 0, positive * x * x, negative * (torch.expm1(low) - low)) + beta * x


@op(tolerance=4e-6)
def rope_queries(
    q: Tensor, positions: Tensor, table: Tensor, pad: int, head_dim: int, norm: Tensor | None, eps: float
) -> Tensor:
    """Rotated queries [T, heads * head_dim] f32 and `pad` heads of zeros behind them, as `attention` reads them.

    `table` and `norm` as in rope_and_cache: for layers that read the keys and values of another.
    """
    heads = q.view(len(q), q.shape[1] // head_dim, head_dim)
    if norm is not None:
        heads = rmsnorm(heads, norm, eps)
    return torch.cat((rotated(heads, positions, table), torch.zeros(len(q), pad, head_dim)), 1).flatten(1)
