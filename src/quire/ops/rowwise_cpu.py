"""The CPU backend's side of the ops of rowwise.py."""

from __future__ import annotations

from torch import Tensor

from quire.ops.cpu import F32, I32, TABLES, Cpu, check
from quire.ops.op import impl


@impl("layernorm", "cpu")
def layernorm(cpu: Cpu, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    rows, d = check(x, "layernorm x", F32, -1, -1).shape
    at_bias = _affine("layernorm", weight, bias, d)
    out = cpu.arena.empty(rows, d)
    if rows:
        cpu.call("layernorm", out.data_ptr(), x.data_ptr(), weight.data_ptr(), at_bias, rows, d, eps)
    return out


@impl("add_layernorm", "cpu")
def add_layernorm(
    cpu: Cpu, x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    rows, d = check(x, "add_layernorm x", F32, -1, -1).shape
    check(delta, "add_layernorm delta", F32, rows, d)
    at_bias = _affine("add_layernorm", weight, bias, d)
    out = cpu.arena.empty(rows, d)
    if rows:
        cpu.call(
            "add_layernorm", out.data_ptr(), x.data_ptr(), delta.data_ptr(), weight.data_ptr(), at_bias, rows, d, eps
        )  # fmt: skip
    return x, out


@impl("norm_spans", "cpu")
def norm_spans(cpu: Cpu, x: Tensor, weight: Tensor, start: int, span: int, centered: bool, eps: float) -> Tensor:
    rows, width = check(x, "norm_spans x", F32, -1, -1).shape
    count = len(check(weight, "norm_spans weight", F32, -1))
    if rows:
        where = x.data_ptr(), weight.data_ptr()
        cpu.call("norm_spans", *where, rows, width, start, count, span, int(centered), eps)
    return x


@impl("join_columns", "cpu")
def join_columns(cpu: Cpu, parts: tuple[Tensor, ...]) -> Tensor:
    rows, width, at = parts[0].shape[0], sum(part.shape[1] for part in parts), 0
    out = cpu.arena.empty(rows, width)
    for part in parts:
        d = check(part, "join_columns part", F32, rows, -1).shape[1]
        if rows:
            cpu.call("place_columns", out.data_ptr(), part.data_ptr(), rows, d, d, width, at)
        at += d
    return out


@impl("take_columns", "cpu")
def take_columns(cpu: Cpu, x: Tensor, start: int, width: int) -> Tensor:
    rows, d = check(x, "take_columns x", F32, -1, -1).shape
    if start < 0 or start + width > d:
        raise ValueError(f"take_columns: rows of {d} numbers have no columns {start} to {start + width}")
    out = cpu.arena.empty(rows, width)
    if rows:
        cpu.call("take_columns", out.data_ptr(), x.data_ptr(), rows, d, start, width)
    return out


@impl("place_columns", "cpu")
def place_columns(cpu: Cpu, out: Tensor, x: Tensor, at: int) -> Tensor:
    total, width = check(out, "place_columns out", F32, -1, -1).shape
    rows, d = x.shape
    if x.dtype is not F32 or x.stride(1) != 1:
        raise ValueError(f"place_columns x: need rows of {F32}, got {x.dtype} with strides {list(x.stride())}")
    if rows > total or at < 0 or at + d > width:
        raise ValueError(f"place_columns: [{rows}, {d}] from column {at} on is no part of [{total}, {width}]")
    if rows:
        cpu.call("place_columns", out.data_ptr(), x.data_ptr(), rows, d, x.stride(0), width, at)
    return out


@impl("add", "cpu")
def add(cpu: Cpu, x: Tensor, delta: Tensor) -> Tensor:
    rows, d = check(x, "add x", F32, -1, -1).shape
    check(delta, "add delta", F32, rows, d)
    if rows:
        cpu.call("add", x.data_ptr(), delta.data_ptr(), rows, d)
    return x


@impl("add_positions", "cpu")
def add_positions(cpu: Cpu, x: Tensor, positions: Tensor, table: Tensor, offset: int) -> Tensor:
    rows, d = check(x, "add_positions x", F32, -1, -1).shape
    check(positions, "add_positions positions", I32, rows)
    check(table, "add_positions table", table.dtype if table.dtype in TABLES else F32, -1, d)
    if rows:
        where, numbers = (x.data_ptr(), positions.data_ptr(), table.data_ptr()), TABLES.index(table.dtype)
        cpu.call("add_positions", *where, rows, d, len(table), offset, numbers)
    return x


@impl("scale", "cpu")
def scale(cpu: Cpu, x: Tensor, factor: float) -> Tensor:
    return _change(cpu, "scale", x, factor)


@impl("softcap", "cpu")
def softcap(cpu: Cpu, x: Tensor, cap: float) -> Tensor:
    return _change(cpu, "softcap", x, cap)


@impl("clip", "cpu")
def clip(cpu: Cpu, x: Tensor, limit: float) -> Tensor:
    return _change(cpu, "clip", x, limit)


@impl("rope_queries", "cpu")
def rope_queries(
    cpu: Cpu, q: Tensor, positions: Tensor, table: Tensor, pad: int, head_dim: int, norm: Tensor | None, eps: float
) -> Tensor:
    rows, width = check(q, "rope_queries q", F32, -1, -1).shape
    check(positions, "rope_queries positions", I32, rows)
    check(table, "rope_queries table", F32, -1, 2, -1)
    if width % head_dim:
        raise ValueError(f"rope_queries: {width} columns are not heads of {head_dim}")
    at_norm = 0 if norm is None else check(norm, "rope_queries norm", F32, head_dim).data_ptr()
    out = cpu.arena.empty(rows, width + pad * head_dim)
    if rows:
        cpu.call(
            "rope_queries", out.data_ptr(), q.data_ptr(), positions.data_ptr(), table.data_ptr(), at_norm,
            rows, width // head_dim, pad, head_dim, table.shape[2], table.shape[0], eps,
        )  # fmt: skip
    return out


def _change(cpu: Cpu, name: str, x: Tensor, number: float) -> Tensor:
    """An op that changes every number of x in place."""
    check(x, f"{name} x", F32, -1, -1)
    if x.numel():
        cpu.call(name, x.data_ptr(), x.numel(), number)
    return x


def _affine(what: str, weight: Tensor, bias: Tensor | None, d: int) -> int:
    """The address of the bias, 0 when there is none, once both have d numbers."""
    check(weight, f"{what} weight", F32, d)
    return 0 if bias is None else check(bias, f"{what} bias", F32, d).data_ptr()
