"""What this machine can do at most: `python -m quire.bench.suite.limits` answers each `{"do": "limits"}` as of now.

A process of its own, whose memory is touched once. The names are those of `quire.figures.metric_definitions.LIMITS`.
"""

from __future__ import annotations

import functools
import signal

import numpy as np

from quire.bench.suite.foreign.protocol import serve
from quire.core.machine import end_with_parent
from quire.ops.cpu.state import Cpu
from quire.ops.cpu.thread_probe import best_seconds, read_rate
from quire.ops.native import Native, huge_bytes

READ_BYTES = 768 << 20
"""More than caches hold."""
ROUNDS = 20000
PROBES = {
    "probe_f32": ("f32", 8 * 16 * 16 * 2),
    "probe_bf16": ("bf16", 8 * 16 * 16 * 4),
    "probe_int8": ("int8", 8 * 16 * 16 * 8),
    "probe_tiles_bf16": ("bf16", 8 * 4 * 16 * 16 * 32 * 2),
    "probe_tiles_int8": ("int8", 8 * 4 * 16 * 16 * 64 * 2),
    **{f"probe_tiles_g{group}": ("int8", 8 * 4 * 16 * 16 * group * 2) for group in (32, 64, 128)},
}
"""Op -> (kind of numbers, operations of a round on one thread): of vectors, and of tiles where there are any, also when
the sums of every group leave them."""
NAMES = {"bf16": "bf16_flops_per_s", "int8": "int8_ops_per_s"}


class Probe:
    """All threads of the native kernels, and memory to read."""

    def __init__(self) -> None:
        self.cpu = Cpu(Native())
        self._data = huge_bytes(READ_BYTES)
        self._data.fill(0)

    def facts(self) -> dict[str, str]:
        """Name of the instruction set unit."""
        return {"isa": self.cpu.native.isa}

    def limits(self) -> dict[str, float]:
        """Limits of this machine by name, per second, of all threads together; half a second."""
        found = {"read_bytes_per_s": read_rate(self.cpu.call, self._data)}
        out = np.zeros(1, np.int64)
        for op, (kind, work) in PROBES.items():
            if op in self.cpu.native.ids and kind in NAMES:
                seconds = best_seconds(functools.partial(self.cpu.call, op, out, ROUNDS))
                rate = ROUNDS * work * self.cpu.native.threads / seconds
                found[NAMES[kind]] = max(rate, found.get(NAMES[kind], 0.0))
        return found


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL)
    serve(Probe())
