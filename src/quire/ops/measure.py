"""What this machine does with 1 .. n threads, measured by the native probes in a fraction of a second."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.arena import huge_bytes
from quire.ops.cpu import Cpu
from quire.ops.native import Native
from quire.ops.op import REGISTRY
from quire.ops.pack import pack
from quire.ops.weights import Weight

READ_BYTES = 128 << 20
"""More than the caches of the machines in mind; pages are touched once before the clock runs."""
SECONDS = 0.06
ROWS, SIDE, GROUP = 64, 1024, 128
ENOUGH = 0.95
STREAMS = (1, 4)


@dataclass(frozen=True)
class ThreadRate:
    """Of `threads` threads together: GB/s of reading memory, G operations/s of an int8 linear of 64 rows."""

    threads: int
    read: float
    linear: float


def best_seconds(fn: Callable[[], object], seconds: float = SECONDS) -> float:
    """The shortest of the calls that fit in `seconds`, of three at least, after one that warms up."""
    fn()
    best, calls, end = float("inf"), 0, time.perf_counter() + seconds
    while calls < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        fn()
        best = min(best, time.perf_counter() - started)
        calls += 1
    return best


def read_rate(cpu: Cpu, data: Tensor, seconds: float = SECONDS) -> float:
    """Bytes/s of reading `data` (uint8, whole MiB): the best of calls in each of `STREAMS`, `seconds` long."""
    total, size = torch.zeros(1, dtype=torch.int64), data.numel()
    read = functools.partial(cpu.call, "probe_read", total.data_ptr(), data.data_ptr(), size)
    return size / min(best_seconds(functools.partial(read, streams), seconds) for streams in STREAMS)


def thread_counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    counts = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*counts, most]


def thread_rates(isa: str, most: int, read_bytes: int = READ_BYTES, seconds: float = SECONDS) -> list[ThreadRate]:
    """Rates of 1, 2, 4, ... `most` threads of one unit. The native thread count is `most` afterwards."""
    cpu = Cpu(Native(isa, most))
    module, linear = cpu.native.module, REGISTRY["linear"].impls["cpu"]
    data = huge_bytes(cpu.native, read_bytes).zero_()
    codes = torch.randint(-127, 128, (SIDE, SIDE), dtype=torch.int8)
    weight = pack(cpu, Weight("int8", codes, torch.ones(SIDE, SIDE // GROUP).half(), group=GROUP))
    x = torch.randn(ROWS, SIDE)

    def multiply() -> None:
        cpu.arena.begin()
        linear(cpu, x, weight, None)

    found = []
    for threads in thread_counts(most):
        module.set_threads(threads)
        read = read_rate(cpu, data, seconds)
        work = best_seconds(multiply, seconds)
        found.append(ThreadRate(threads, read / 1e9, 2 * ROWS * SIDE * SIDE / work / 1e9))
    return found


def enough_threads(rates: list[ThreadRate]) -> int:
    """The fewest threads that read memory at `ENOUGH` of the best rate: decoding needs no more, prompts do."""
    best = max(r.read for r in rates)
    return next(r.threads for r in rates if r.read >= ENOUGH * best)
