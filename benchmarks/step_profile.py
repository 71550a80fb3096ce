"""Where the time of a prompt, or of a decode step, goes: every op beside what the machine could do at best.

    python benchmarks/step_profile.py --shape qwen-0.6b --prompt 512
    python benchmarks/step_profile.py --shape llama-1b --quantization int4 --group-size 32 --batch 1

Ops run one by one (`enforce_eager`) under a clock, with random weights. Of products and attention the operations (a
multiply-add is two) and the bytes of weights, keys and values are counted from their sizes; `at best` is the time that
these would take at the peak of their unit or at the best read rate, whichever is longer, both measured right after the
run (as `kernels.py` does).
"""

from __future__ import annotations

import argparse
import collections
import tempfile
import time
from pathlib import Path
from typing import Any

from kernels import Bench, Limits
from peer_quire import Peer
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, write_config

from quire.ops.cpu.matrix import GROWING, CpuMatrix
from quire.ops.facts import LANES
from quire.ops.kinds import KINDS

REPEATS = 5
CONTEXT = 128
NAMES = tuple(KINDS)
PEAK = {"f32": "f32", "bf16": "bf16", "bf12": "bf16", "fp8": "bf16", "int8": "int8", "int4": "int8", "table4": "int8"}


def product(op: str, args: tuple[Any, ...]) -> tuple[str, float, float, str]:
    """A call's name in the table, its operations, the bytes that it must read, and the kind of its numbers.

    Attention is that of one whole prompt, or of rows that each continue a sequence of `CONTEXT` tokens.
    """
    if op in ("gated_mlp", "plain_mlp"):
        first, down = CpuMatrix.from_address(args[2]), CpuMatrix.from_address(args[4])
        kind, m, weights = NAMES[first.kind], args[6], (first.n + down.k) * down.n
        return f"{op} {kind} {down.k}x{down.n}", 2.0 * m * weights, bytes_of(first) + bytes_of(down), kind
    if op == "linear":
        w, m = CpuMatrix.from_address(args[2]), args[4]
        return f"{op} {NAMES[w.kind]} {w.n}x{w.k}", 2.0 * m * w.n * w.k, bytes_of(w), NAMES[w.kind]
    if op == "attention":
        rows, sequences, heads, kv_heads, d = args[7:12]
        seen = rows * (rows + 1) / 2 if rows > sequences else rows * CONTEXT
        return op, 4.0 * heads * d * seen, 0.0 if rows > sequences else 4.0 * kv_heads * d * seen, "bf16"
    return op, 0.0, 0.0, "f32"


def bytes_of(w: CpuMatrix) -> float:
    """Bytes of a packed matrix, without those that all of its rows share."""
    return float(-(-w.n // LANES) * sum(getattr(w, step) for step in GROWING.values()))


class Clock:
    """Stands in for `Cpu.call` and adds up seconds, operations and bytes by name."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.seconds: collections.Counter[str] = collections.Counter()
        self.calls: collections.Counter[str] = collections.Counter()
        self.work: dict[str, collections.Counter[tuple[float, float, str]]] = {}

    def __call__(self, op: str, *args: Any) -> None:
        name, *work = product(op, args)
        begin = time.perf_counter()
        self._call(op, *args)
        self.seconds[name] += time.perf_counter() - begin
        self.calls[name] += 1
        self.work.setdefault(name, collections.Counter())[work[0], work[1], str(work[2])] += 1

    def best(self, name: str, limits: Limits) -> float:
        """Seconds of all calls of `name` at the machine's limits."""
        return sum(
            count * max(ops / limits.peak[PEAK[kind]], size / limits.read) / 1e9
            for (ops, size, kind), count in self.work[name].items()
        )


def measure(peer: Peer, prompt: int, batch: int) -> tuple[Clock, float]:
    """Clocked ops of `REPEATS` prompts, or of as many decode steps of `batch` sequences, and the seconds of all."""
    cpu = peer.engine.engine.ops.cpu
    assert cpu is not None
    if batch:
        for _ in range(batch):
            peer.submit(CONTEXT, 4 * REPEATS)
        while peer._begun() < batch:
            peer.engine.poll(0)
        peer.engine.poll(0)
    else:
        peer.prefill(prompt)
    clock, call = Clock(cpu.call), cpu.call
    cpu.call = clock  # type: ignore[method-assign]
    begin = time.perf_counter()
    for _ in range(REPEATS):
        peer.engine.poll(0) if batch else peer.prefill(prompt)
    total = time.perf_counter() - begin
    cpu.call = call  # type: ignore[method-assign]
    return clock, total


def show(console: Console, clock: Clock, total: float, limits: Limits) -> None:
    """One row an op, by time, and their sum beside the whole."""
    table = Table(
        title=f"read {limits.read:.1f} GB/s, " + ", ".join(f"{k} {v:.0f} GOP/s" for k, v in limits.peak.items())
    )
    for name in ("op", "calls", "ms", "of all", "at best ms", "of the limit"):
        table.add_column(name, justify="left" if name == "op" else "right", no_wrap=True)
    least = 0.0
    for name, seconds in clock.seconds.most_common():
        best = clock.best(name, limits)
        least += best
        share = (f"{best / REPEATS * 1e3:.2f}", f"{best / seconds:.0%}") if best else ("", "")
        table.add_row(
            name,
            f"{clock.calls[name] / REPEATS:.0f}",
            f"{seconds / REPEATS * 1e3:.2f}",
            f"{seconds / total:.1%}",
            *share,
        )
    rest = total - sum(clock.seconds.values())
    table.add_row("outside the ops", "", f"{rest / REPEATS * 1e3:.2f}", f"{rest / total:.1%}", "", "")
    table.add_row("all", "", f"{total / REPEATS * 1e3:.2f}", "", f"{least / REPEATS * 1e3:.2f}", f"{least / total:.0%}")
    console.print(table)


def main() -> None:
    """Measure and print the table."""
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--bf16-bits", type=int, default=16)
    parser.add_argument("--threads", type=int, default=0, help="threads (0: all cores)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument(
        "--batch", type=int, default=0, help=f"sequences of a decode step, after {CONTEXT} tokens, instead of a prompt"
    )
    args = parser.parse_args()
    options = {name: getattr(args, name) for name in ("quantization", "group_size", "bf16_bits", "threads")}
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(str(write_config(args.shape, Path(folder))), options | {"enforce_eager": True, "dtype": "bfloat16"})
        clock, total = measure(peer, args.prompt, args.batch)
    bench = Bench(peer.engine.engine.ops, 0.3, (), ())
    show(Console(width=110), clock, total, bench.limits)


if __name__ == "__main__":
    main()
