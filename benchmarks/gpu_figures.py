"""What the measurements of gpu_check.py share: sizes of a run, times on the device, lines of results."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire.ops.op import IMPLEMENTATIONS, REGISTRY, load_definitions
from quire.ops.triton.gpu import load_kernels


@dataclass(frozen=True)
class Scale:
    """Sizes of one kind of run."""

    dry: bool

    def __call__(self, real: int, tiny: int) -> int:
        """One of the two."""
        return tiny if self.dry else real


def tell(**figures: Any) -> None:
    """A line of results."""
    print(json.dumps(figures), flush=True)


def missing() -> tuple[str, ...]:
    """Ops without a kernel run their reference, and the results say which."""
    load_definitions()
    load_kernels()
    return tuple(f"{name}=reference" for name in sorted(REGISTRY) if "triton" not in IMPLEMENTATIONS.get(name, {}))


def seconds(fn: Callable[[], Any], rounds: int) -> float:
    """Median time of a call on the device, after one that compiles."""
    fn()
    if not torch.cuda.is_available():
        started = time.perf_counter()
        fn()
        return time.perf_counter() - started
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        fn()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
