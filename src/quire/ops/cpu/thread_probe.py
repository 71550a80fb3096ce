"""What this machine does with 1 .. n threads, measured by the native probes in a fraction of a second."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.core.dtypes import F16, F32, I8, I64
from quire.ops.arrays import Host
from quire.ops.cpu.pack import pack
from quire.ops.cpu.state import Cpu
from quire.ops.native import Native, huge_bytes
from quire.ops.op import IMPLEMENTATIONS, load_modules
from quire.ops.weights import Weight

READ_BYTES = 128 << 20
"""More than the caches of the machines in mind; pages are touched once before the clock runs."""
SECONDS = 0.06
ROWS, SIDE, GROUP = 64, 1024, 128
ENOUGH = 0.95
STREAMS = (1, 4)


@dataclass(frozen=True)
class ThreadRate:
    """Rates of `threads` threads together: GB/s of reading memory, G operations/s of an int8 linear of 64 rows."""

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


def read_rate(native: Callable[..., None], data: Host, seconds: float = SECONDS) -> float:
    """Bytes/s of reading `data` (uint8, whole MiB): the best of calls in each of `STREAMS`, `seconds` long.

    `native` runs a native op by its name, as `Ops.native` does.
    """
    total, size = np.zeros(1, I64), data.size
    read = functools.partial(native, "probe_read", total, data, size)
    return size / min(best_seconds(functools.partial(read, streams), seconds) for streams in STREAMS)


def thread_counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    counts = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*counts, most]


def thread_rates(isa: str, most: int, read_bytes: int = READ_BYTES, seconds: float = SECONDS) -> list[ThreadRate]:
    """Rates of 1, 2, 4, ... `most` threads of one unit. The native thread count is `most` afterwards."""
    load_modules("quire.ops.cpu")
    cpu = Cpu(Native(isa, most))
    module, linear = cpu.native.module, IMPLEMENTATIONS["linear"]["cpu"]
    data = huge_bytes(read_bytes)
    data[:] = 0
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (SIDE, SIDE), I8)
    weight = pack(cpu, Weight("int8", codes, np.ones((SIDE, SIDE // GROUP), F16), group=GROUP))
    x = rng.standard_normal((ROWS, SIDE), F32)

    def multiply() -> None:
        cpu.arena.begin()
        linear(cpu, x, weight, None)

    found = []
    for threads in thread_counts(most):
        module.set_threads(threads)
        read = read_rate(cpu.call, data, seconds)
        work = best_seconds(multiply, seconds)
        found.append(ThreadRate(threads, read / 1e9, 2 * ROWS * SIDE * SIDE / work / 1e9))
    return found


def enough_threads(rates: list[ThreadRate]) -> int:
    """The fewest threads that read memory at `ENOUGH` of the best rate: decoding needs no more, prompts do."""
    best = max(r.read for r in rates)
    return next(r.threads for r in rates if r.read >= ENOUGH * best)
