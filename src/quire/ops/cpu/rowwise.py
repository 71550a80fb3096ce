"""The CPU backend's side of the ops of rowwise.py."""

from __future__ import annotations

import functools

import numpy as np

from quire.core.dtypes import F32, I32
from quire.ops.arrays import Host, address
from quire.ops.cpu.descriptor_cache import rope_descriptor
from quire.ops.cpu.state import TABLE_NUMBERS, Cpu
from quire.ops.descriptors import SpansDescriptor
from quire.ops.native import check
from quire.ops.op import impl


@impl("layernorm", "cpu")
def layernorm(cpu: Cpu, x: Host, weight: Host, bias: Host | None, eps: float) -> Host:
    rows, d = check(x, "layernorm x", F32, -1, -1).shape
    at_bias = _affine("layernorm", weight, bias, d)
    out = cpu.arena.empty(rows, d)
    if rows:
        cpu.call("layernorm", out, x, weight, at_bias, rows, d, eps)
    return out


@impl("add_layernorm", "cpu")
def add_layernorm(cpu: Cpu, x: Host, delta: Host, weight: Host, bias: Host | None, eps: float) -> tuple[Host, Host]:
    rows, d = check(x, "add_layernorm x", F32, -1, -1).shape
    check(delta, "add_layernorm delta", F32, rows, d)
    at_bias = _affine("add_layernorm", weight, bias, d)
    out = cpu.arena.empty(rows, d)
    if rows:
        cpu.call(
            "add_layernorm", out, x, delta, weight, at_bias, rows, d, eps
        )  # fmt: skip
    return x, out


@impl("norm_spans", "cpu")
def norm_spans(cpu: Cpu, x: Host, weight: Host, start: int, span: int, centered: bool, eps: float) -> Host:
    rows, width = check(x, "norm_spans x", F32, -1, -1).shape
    count = len(check(weight, "norm_spans weight", F32, -1))
    if rows:
        spans = SpansDescriptor(
            weight=address(weight), start=start, count=count, span=span, centered=int(centered), eps=eps
        )
        cpu.call("norm_spans", x, spans, rows, width)
    return x


@impl("join_columns", "cpu")
def join_columns(cpu: Cpu, parts: tuple[Host, ...]) -> Host:
    rows, width, at = parts[0].shape[0], sum(part.shape[1] for part in parts), 0
    out = cpu.arena.empty(rows, width)
    for part in parts:
        d = check(part, "join_columns part", F32, rows, -1).shape[1]
        if rows:
            cpu.call("place_columns", out, part, rows, d, d, width, at)
        at += d
    return out


@impl("take_columns", "cpu")
def take_columns(cpu: Cpu, x: Host, start: int, width: int) -> Host:
    rows, d = check(x, "take_columns x", F32, -1, -1).shape
    if start < 0 or start + width > d:
        raise ValueError(f"take_columns: rows of {d} numbers have no columns {start} to {start + width}")
    out = cpu.arena.empty(rows, width)
    if rows:
        cpu.call("take_columns", out, x, rows, d, start, width)
    return out


@impl("place_columns", "cpu")
def place_columns(cpu: Cpu, out: Host, x: Host, at: int) -> Host:
    total, width = check(out, "place_columns out", F32, -1, -1).shape
    rows, d = x.shape
    if x.dtype != F32 or (rows and d > 1 and x.strides[1] != x.itemsize):
        raise ValueError(f"place_columns x: need rows of {F32}, got {x.dtype} with strides of {list(x.strides)} bytes")
    if rows > total or at < 0 or at + d > width:
        raise ValueError(f"place_columns: [{rows}, {d}] from column {at} on is no part of [{total}, {width}]")
    if rows:
        cpu.call("place_columns", out, x, rows, d, x.strides[0] // x.itemsize, width, at)
    return out


@impl("add", "cpu")
def add(cpu: Cpu, x: Host, delta: Host) -> Host:
    rows, d = check(x, "add x", F32, -1, -1).shape
    check(delta, "add delta", F32, rows, d)
    if rows:
        cpu.call("add", x, delta, rows, d)
    return x


@impl("add_positions", "cpu")
def add_positions(cpu: Cpu, x: Host, positions: Host, table: Host, offset: int) -> Host:
    rows, d = check(x, "add_positions x", F32, -1, -1).shape
    check(positions, "add_positions positions", I32, rows)
    check(table, "add_positions table", table.dtype if table.dtype in TABLE_NUMBERS else F32, -1, d)
    if rows:
        where, numbers = (x, positions, table), TABLE_NUMBERS[table.dtype]
        cpu.call("add_positions", *where, rows, d, len(table), offset, numbers)
    return x


@impl("scale", "cpu")
def scale(cpu: Cpu, x: Host, factor: float) -> Host:
    return _change(cpu, "scale", x, factor)


@functools.cache
def _steps(count: int, step: int, ahead: int) -> Host:
    """Where a row's factor lies, at an address that recorded steps may keep."""
    return np.array((count, step, ahead), np.int64)


@impl("scale_rows", "cpu")
def scale_rows(
    cpu: Cpu, x: Host, factors: Host, columns: int, positions: Host | None = None, step: int = 1, ahead: int = 0
) -> Host:
    rows, width = check(x, "scale_rows x", F32, -1, -1).shape
    check(factors, "scale_rows factors", F32, rows if positions is None else -1)
    if positions is not None:
        check(positions, "scale_rows positions", I32, rows)
    if rows:
        cpu.call("scale_rows", x, factors, positions, _steps(factors.size, step, ahead), rows, columns, width)
    return x


@impl("softcap", "cpu")
def softcap(cpu: Cpu, x: Host, cap: float) -> Host:
    return _change(cpu, "softcap", x, cap)


@impl("clip", "cpu")
def clip(cpu: Cpu, x: Host, limit: float) -> Host:
    return _change(cpu, "clip", x, limit)


@impl("xielu", "cpu")
def xielu(cpu: Cpu, x: Host, positive: float, negative: float, beta: float) -> Host:
    check(x, "xielu x", F32, -1, -1)
    if x.size:
        cpu.call("xielu", x, x.size, positive, negative, beta)
    return x


@impl("rope_queries", "cpu")
def rope_queries(
    cpu: Cpu, q: Host, positions: Host, table: Host, pad: int, head_dim: int, norm: Host | None, eps: float
) -> Host:
    rows, width = check(q, "rope_queries q", F32, -1, -1).shape
    check(positions, "rope_queries positions", I32, rows)
    check(table, "rope_queries table", F32, -1, 2, -1)
    if width % head_dim:
        raise ValueError(f"rope_queries: {width} columns are not heads of {head_dim}")
    at_norm = None if norm is None else check(norm, "rope_queries norm", F32, head_dim)
    out = cpu.arena.empty(rows, width + pad * head_dim)
    if rows:
        rope = rope_descriptor(table, width // head_dim, (at_norm, None), eps)
        cpu.call("rope_queries", out, q, positions, rope, rows, pad, head_dim)
    return out


def _change(cpu: Cpu, name: str, x: Host, number: float) -> Host:
    """An op that changes every number of x in place."""
    check(x, f"{name} x", F32, -1, -1)
    if x.size:
        cpu.call(name, x, x.size, number)
    return x


def _affine(what: str, weight: Host, bias: Host | None, d: int) -> Host | None:
    """The bias, once it and the weight have d numbers."""
    check(weight, f"{what} weight", F32, d)
    return None if bias is None else check(bias, f"{what} bias", F32, d)
