"""Ops on rows that some families need besides those of reference.py, with their cases."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from quire.ops.cases import normal
from quire.ops.op import Case, cases, op
from quire.ops.reference import rmsnorm


@op(tolerance=4e-6)
def layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, rows of x [T, d] f32 (Ba et al. 2016)."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


@op(tolerance=4e-6)
def add_layernorm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its layernorm), all [T, d] f32. x is given up: the sum, the residual stream, may lie in its place."""
    x.add_(delta)
    return x, layernorm(x, weight, bias, eps)


@op(tolerance=4e-6)
def norm_spans(x: Tensor, weight: Tensor, start: int, span: int, centered: bool, eps: float) -> Tensor:
    """Norm each run of `span` columns from `start` on, len(weight) columns in all, in place; returns x [T, width] f32.

    `centered`: layernorm instead of rmsnorm. The span is a head, or all heads of a row; weights may differ from
    head to head.
    """
    part = x[:, start : start + len(weight)]
    runs = part.reshape(len(part), len(weight) // span, span)
    weights = weight.view(-1, span)
    ones = torch.ones(span)
    part.copy_(((layernorm(runs, ones, None, eps) if centered else rmsnorm(runs, ones, eps)) * weights).flatten(1))
    return x


@op(tolerance=0.0)
def join_columns(parts: tuple[Tensor, ...]) -> Tensor:
    """Matrices [T, d_i] f32 beside each other: [T, sum of d_i]."""
    return torch.cat(parts, 1)


@op(tolerance=0.0)
def take_columns(x: Tensor, start: int, width: int) -> Tensor:
    """x[:, start : start + width] of x [T, d] f32: [T, width]."""
    return x[:, start : start + width].contiguous()


@op(tolerance=0.0)
def place_columns(out: Tensor, x: Tensor, at: int) -> Tensor:
    """out[:T, at : at + d] = x [T, d] f32, the rest of out [N, width] f32 as it is; returns out.

    Rows of x may lie apart: it may be some columns of a matrix.
    What a step leaves at a fixed address for who reads it after the step.
    """
    out[: len(x), at : at + x.shape[1]] = x
    return out


@op(tolerance=0.0)
def add(x: Tensor, delta: Tensor) -> Tensor:
    """x += delta in place, both [T, d] f32; returns x."""
    return x.add_(delta)


@op(tolerance=0.0)
def add_positions(x: Tensor, positions: Tensor, table: Tensor, offset: int) -> Tensor:
    """x [T, d] f32 += table[positions + offset] in place, table [P, d] f32, bf16, f16: learned positions; returns x."""
    return x.add_(table[positions.long() + offset].float())


@op(tolerance=0.0)
def scale(x: Tensor, factor: float) -> Tensor:
    """x *= factor in place; returns x [T, d] f32."""
    return x.mul_(factor)


@op(tolerance=2e-6)
def softcap(x: Tensor, cap: float) -> Tensor:
    """x = cap * tanh(x / cap) in place; returns x [T, d] f32 (Gemma 2's output)."""
    return x.div_(cap).tanh_().mul_(cap)


@op(tolerance=0.0)
def clip(x: Tensor, limit: float) -> Tensor:
    """x limited to [-limit, limit] in place; returns x [T, d] f32 (OLMo's and MPT's queries, keys and values)."""
    return x.clamp_(-limit, limit)


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
    half = table.shape[2]
    cos, sin = table[positions.long()].unsqueeze(1).unbind(2)
    a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
    return torch.cat((rotated, torch.zeros(len(q), pad, head_dim)), 1).flatten(1)


SHAPES = ((1, 64), (3, 33), (200, 256), (2, 8), (1, 1), (0, 16), (2, 9000))


@cases("layernorm")
def layernorm_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        bias = normal(g, d) if t % 2 else None
        yield {"x": normal(g, t, d) * 10.0 ** (t % 4 - 1), "weight": normal(g, d), "bias": bias, "eps": 1e-5}
    yield {"x": normal(g, 3, 48) + 100.0, "weight": torch.ones(48), "bias": None, "eps": 1e-5}


@cases("add_layernorm")
def add_layernorm_cases(g: Generator) -> Iterator[Case]:
    for case in layernorm_cases(g):
        yield case | {"delta": normal(g, *case["x"].shape)}


@cases("norm_spans")
def norm_spans_cases(g: Generator) -> Iterator[Case]:
    for t, width, start, count, span in ((1, 64, 0, 64, 64), (5, 96, 32, 48, 24), (40, 33, 3, 30, 5), (0, 16, 0, 8, 8)):
        for centered in (False, True):
            x = normal(g, t, width)
            weight = normal(g, count)
            yield {"x": x, "weight": weight, "start": start, "span": span, "centered": centered, "eps": 1e-5}


@cases("join_columns")
def join_columns_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        yield {"parts": (normal(g, t, d), normal(g, t, 7), normal(g, t, 32))}


@cases("take_columns")
def take_columns_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        yield {"x": normal(g, t, d + 9), "start": t % 9, "width": d}
        yield {"x": normal(g, t, d), "start": 0, "width": d}


@cases("place_columns")
def place_columns_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        yield {"out": normal(g, t + 2, d + 9), "x": normal(g, t, d), "at": t % 9}
        yield {"out": normal(g, t, d), "x": normal(g, t, d), "at": 0}


@cases("add")
def add_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        yield {"x": normal(g, t, d), "delta": normal(g, t, d)}


@cases("add_positions")
def add_positions_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        for offset in (0, 2):
            positions = torch.randint(50, (t,), generator=g, dtype=torch.int32)
            table = normal(g, 50 + offset, d)
            yield {"x": normal(g, t, d), "positions": positions, "table": table, "offset": offset}
            for short in (torch.bfloat16, torch.float16):
                yield {"x": normal(g, t, d), "positions": positions, "table": table.to(short), "offset": offset}


@cases("scale")
def scale_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        yield {"x": normal(g, t, d), "factor": 11.3137085}


@cases("softcap")
def softcap_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        yield {"x": normal(g, t, d) * 20.0, "cap": 30.0}


@cases("clip")
def clip_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        yield {"x": normal(g, t, d), "limit": 0.75}


@cases("rope_queries")
def rope_queries_cases(g: Generator) -> Iterator[Case]:
    for t, heads, pad, d, half in ((1, 4, 2, 16, 8), (5, 3, 2, 24, 4), (40, 8, 4, 8, 0), (0, 2, 2, 8, 4)):
        angles = torch.rand((64, half), generator=g) * 6
        yield {
            "q": normal(g, t, heads * d),
            "positions": torch.randint(64, (t,), generator=g, dtype=torch.int32),
            "table": torch.stack((angles.cos(), angles.sin()), 1),
            "pad": pad,
            "head_dim": d,
            "norm": normal(g, d) if t != 5 else None,
            "eps": 1e-6,
        }
