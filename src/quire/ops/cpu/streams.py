"""The CPU backend's side of the ops of streams.py."""

from __future__ import annotations

from quire.core.dtypes import F32
from quire.ops.arrays import Host
from quire.ops.cpu.state import Cpu
from quire.ops.native import check
from quire.ops.op import impl


@impl("mix_streams", "cpu")
def mix_streams(cpu: Cpu, x: Host, m: Host, weight: Host, bias: Host, out: int) -> Host:
    rows, width = check(x, "mix_streams x", F32, -1, -1).shape
    p = check(m, "mix_streams m", F32, rows, -1).shape[1]
    count = check(weight, "mix_streams weight", F32, -1, p).shape[0]
    check(bias, "mix_streams bias", F32, count)
    streams = count // out
    if streams * out != count or width % streams:
        raise ValueError(f"mix_streams: {count} numbers do not make {out} streams of rows of {width}")
    h = width // streams
    found = cpu.arena.empty(rows, out * h)
    if rows:
        cpu.call("mix_streams", found, x, m, weight, bias, rows, h, streams, out, p)
    return found


@impl("sinkhorn_gates", "cpu")
def sinkhorn_gates(cpu: Cpu, x: Host, streams: int, turns: int, most: float, least: float) -> Host:
    rows = check(x, "sinkhorn_gates x", F32, -1, (2 + streams) * streams).shape[0]
    if rows:
        cpu.call("sinkhorn_gates", x, rows, streams, turns, most, least)
    return x


@impl("match_lengths", "cpu")
def match_lengths(cpu: Cpu, x: Host, streams: int, least: float) -> Host:
    rows, width = check(x, "match_lengths x", F32, -1, -1).shape
    if width % streams:
        raise ValueError(f"match_lengths: rows of {width} numbers are not {streams} streams")
    if rows:
        cpu.call("match_lengths", x, rows, width // streams, streams, least)
    return x


@impl("sparse_gate", "cpu")
def sparse_gate(cpu: Cpu, x: Host, factor: float) -> Host:
    rows, width = check(x, "sparse_gate x", F32, -1, -1).shape
    if width % 2:
        raise ValueError(f"sparse_gate: rows of {width} numbers are not gates and as many others")
    if rows:
        cpu.call("sparse_gate", x, rows, width // 2, factor)
    return x


@impl("scale_columns", "cpu")
def scale_columns(cpu: Cpu, x: Host, factors: Host) -> Host:
    rows, d = check(x, "scale_columns x", F32, -1, -1).shape
    check(factors, "scale_columns factors", F32, d)
    if rows:
        cpu.call("scale_columns", x, factors, rows, d)
    return x
