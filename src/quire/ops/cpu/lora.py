"""The CPU backend's side of the ops of adapters."""

from __future__ import annotations

import functools

import numpy as np

from quire.core.dtypes import F32, I32
from quire.ops.arrays import Host
from quire.ops.cpu.state import ACTIVATION_NUMBERS, Cpu
from quire.ops.native import check
from quire.ops.op import impl


@impl("lora", "cpu")
def lora(cpu: Cpu, x: Host, y: Host, a: Host, b: Host, rows: Host, start: int) -> Host:
    count, k = check(x, "lora x", F32, -1, -1).shape
    slots, rank = check(a, "lora a", F32, -1, -1, k).shape[:2]
    check(b, "lora b", F32, slots, rank, -1)
    check(y, "lora y", F32, count, -1)
    _check_rows(rows, count)
    if not count:
        return y
    h = cpu.arena.empty(count, rank)
    cpu.call("lora_shrink", h, x, a, rows, count, k, rank, slots)
    return lora_expand(cpu, h, y, b, rows, start)


@impl("lora_expand", "cpu")
def lora_expand(cpu: Cpu, h: Host, y: Host, b: Host, rows: Host, start: int) -> Host:
    count, width = check(y, "lora_expand y", F32, -1, -1).shape
    rank = check(h, "lora_expand h", F32, count, -1).shape[1]
    n = check(b, "lora_expand b", F32, -1, rank, -1).shape[2]
    _check_rows(rows, count)
    if count:
        cpu.call("lora_expand", y, h, b, rows, count, n, rank, width, start)
    return y


@impl("lora_scale", "cpu")
def lora_scale(cpu: Cpu, y: Host, excess: Host, rows: Host) -> Host:
    """Scale rows by the kernels there are: factors are rows of ones to which each adapter adds its own, then
    relu(factor) * y."""
    count, n = check(y, "lora_scale y", F32, -1, -1).shape
    check(excess, "lora_scale excess", F32, -1, 1, n)
    _check_rows(rows, count)
    if not count:
        return y
    factors, both = cpu.arena.empty(count, n), cpu.arena.empty(count, 2 * n)
    first, one = _zeros(_size(count)), _ones(_size(max(count, n)))
    cpu.call("embedding", factors, first, one, count, n, 1, 0, -1)
    cpu.call(
        "lora_expand", factors, one, excess, rows, count, n, 1, n, 0
    )  # fmt: skip
    cpu.call("place_columns", both, factors, count, n, n, 2 * n, 0)
    cpu.call("place_columns", both, y, count, n, n, 2 * n, n)
    cpu.call("gated_activation", y, both, count, n, ACTIVATION_NUMBERS["relu"])
    return y


def _check_rows(rows: Host, count: int) -> None:
    if len(check(rows, "lora rows", I32, -1)) < count:
        raise ValueError(f"lora: {len(rows)} adapter numbers for {count} rows")


def _size(count: int) -> int:
    """Few sizes, so that few constants are kept."""
    return 1 << (count - 1).bit_length()


@functools.cache
def _ones(size: int) -> Host:
    """Kept for ever: recordings hold the address."""
    return np.ones(size, F32)


@functools.cache
def _zeros(size: int) -> Host:
    return np.zeros(size, I32)
