"""Native ops against the limits of this machine: read bandwidth through huge pages and the peak of each product.

    python -m benchmarks.kernels.cpu_ops [--threads N] [--isa avx512] [--seconds 0.3] [--output results/kernels.json]
    python -m benchmarks.kernels.cpu_ops --only linear --kinds fp8 int8 --rows 1 16 512

A row says how long an op took (median and best), the bytes of weights or cache it must read and the operations it must
do, per second, and the larger of the two shares of the machine's limit. Shapes are those of a Llama of 1 G parameters.
Weights rotate through more memory than the caches hold. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from quire.bench.suite.limits import PROBES, ROUNDS
from quire.core.config import DeviceConfig
from quire.core.dtypes import BF16
from quire.ops.arrays import Host
from quire.ops.backend import Ops, open_backend
from quire.ops.cpu.thread_probe import best_seconds, read_rate
from quire.ops.kinds import SUPER_KINDS
from quire.ops.layout import KVLayout
from quire.ops.native import UNITS, huge_bytes
from quire.ops.op import Case
from quire.ops.reference.caches import allocate
from quire.ops.weights import Packed, PackedTable, Weight

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from op_cases.weights import normal
from over_torch import arrays

READ_BYTES = 768 << 20
COLD_BYTES = 512 << 20
"""Weights of one measurement: more than the last-level cache of the machines in mind."""
MAX_COPIES = 32
KINDS = (("bf16", 0), ("bf12", 0), ("fp8", 128), ("int8", 32), ("int8", 128), ("int4", 32), ("int4", 128))
SUPER_FORMS = {kind: form for form, kind in SUPER_KINDS.items()}
SHAPES = ((2048, 2048), (8192, 2048), (2048, 8192), (32000, 2048))
ROWS = (1, 4, 16, 64, 512)
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 64
PEAK_OF = {"f32": "f32", "bf16": "bf16", "bf12": "bf16", "fp8": "bf16"}
"""Kind of products; "int8" for all others."""


@dataclass(frozen=True)
class Limits:
    """Of all threads together: GB/s of reading, G operations/s of each kind of product (a multiply-add is two).

    `probes` are those of each instruction, `peak` the best of a kind: what a share is a share of.
    """

    read: float
    probes: dict[str, float]

    @property
    def peak(self) -> dict[str, float]:
        """By kind of numbers."""
        found: dict[str, float] = {}
        for op, rate in self.probes.items():
            found[PROBES[op][0]] = max(rate, found.get(PROBES[op][0], 0.0))
        return found


@dataclass(frozen=True)
class Row:
    """One measurement: microseconds, GB/s, G operations/s, and the larger share of the limit (1 = the limit).

    `read` and `peak` are the limits measured right before and after the row, the better of both: on a machine that is
    shared they change within seconds.
    """

    op: str
    case: str
    median_us: float
    best_us: float
    gb_per_s: float
    gop_per_s: float
    read: float
    peak: float

    @property
    def share(self) -> float:
        """Of the limit that is nearer."""
        return max(self.gb_per_s / self.read, self.gop_per_s / self.peak)


def random_weight(g: torch.Generator, kind: str, n: int, k: int, group: int) -> Weight:
    """A weight that is packed as `kind`."""
    from op_cases import reference as cases

    if kind in SUPER_FORMS:
        return arrays(cases.super_weight(g, SUPER_FORMS[kind], n, k))  # type: ignore[no-any-return]
    return arrays(cases.random_weight(g, "bf16" if kind == "bf12" else kind, n, k, group or 32))  # type: ignore[no-any-return]


class Bench:
    """Times calls for a fixed wall-clock time each and turns them into rows."""

    def __init__(self, ops: Ops, seconds: float, kinds: Collection[str], rows: Sequence[int]) -> None:
        self.ops, self.cpu, self.seconds, self.kinds, self.rows = ops, ops.cpu, seconds, kinds, rows
        self._data = huge_bytes(READ_BYTES)
        self._data.fill(0)
        self.limits = self.limits_of("f32", "bf16", "int8")

    def times(self, fn: Callable[[], Any]) -> list[float]:
        """Seconds of each call, at least three, after one that warms up."""
        fn()
        found: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(found) < 3 or time.perf_counter() < end:
            begin = time.perf_counter()
            fn()
            found.append(time.perf_counter() - begin)
        return found

    def row(
        self, op: str, case: str, fn: Callable[[], Any], size: float, work: float, peak: str, calls: int = 1
    ) -> Row:
        """`fn` makes `calls` calls that each read `size` bytes and do `work` operations of kind `peak`."""
        before = self.limits_of(peak)
        seconds = self.times(fn)
        after = self.limits_of(peak)
        best, median = min(seconds) / calls, statistics.median(seconds) / calls
        limits = (max(before.read, after.read), max(before.peak[peak], after.peak[peak]))
        return Row(op, case, median * 1e6, best * 1e6, size / best / 1e9, work / best / 1e9, *limits)

    def limits_of(self, *peaks: str) -> Limits:
        """The limits of this moment: reading, and the products of these kinds."""
        out, probes = np.zeros(1, np.int64), {}
        for op, (kind, work) in PROBES.items():
            if op in self.cpu.native.ids and kind in peaks:
                seconds = best_seconds(lambda op=op: self.cpu.call(op, out, ROUNDS))
                probes[op] = ROUNDS * work * self.ops.threads / seconds / 1e9
        return Limits(read_rate(self.cpu.call, self._data) / 1e9, probes)

    def linear(self, g: torch.Generator) -> Iterator[Row]:
        """Every kind of weight, shape and number of rows."""
        for kind, group in (*KINDS, *((kind, 0) for kind in SUPER_FORMS)):
            for n, k in SHAPES if kind in self.kinds else ():
                weight = random_weight(g, kind, n, k, group)
                first = self.ops.pack(weight, narrow=kind == "bf12")
                copies = min(MAX_COPIES, -(-COLD_BYTES // first.nbytes))
                packed = [first, *(self.ops.pack(weight, narrow=kind == "bf12") for _ in range(copies - 1))]
                for m in self.rows:
                    yield self._linear_row(g, packed, m, f"{kind}{f' g{group}' if group else ''} {n}x{k} m={m}")

    def _linear_row(self, g: torch.Generator, packed: list[Packed], m: int, case: str) -> Row:
        first = packed[0]
        x = normal(g, m, first.k).numpy()
        several = packed if m <= 16 else packed[:1]

        def call() -> None:
            for w in several:
                self.ops.begin_step()
                self.ops.linear(x, w, None)

        work = 2 * m * first.n * first.k
        return self.row("linear", case, call, first.nbytes, work, PEAK_OF.get(first.kind, "int8"), len(several))

    def embedding(self, g: torch.Generator) -> Iterator[Row]:
        """Rows of a table of tokens as it is, and as a packed matrix; the bytes are those of the rows."""
        n, k = SHAPES[-1]
        for kind, group in KINDS:
            weight = random_weight(g, kind, n, k, group)
            matrix = self.ops.pack(weight, narrow=kind == "bf12")
            tables = {f"{kind} g{group}" if group else f"{kind} packed": PackedTable(matrix, True)}
            if kind == "bf16":
                tables[kind] = weight.codes  # type: ignore[assignment]
            for (name, table), m in itertools.product(tables.items(), self.rows):
                tokens = torch.randint(n, (m,), generator=g, dtype=torch.int32).numpy()

                def call(tokens: Host = tokens, table: Host | PackedTable = table) -> None:
                    self.ops.begin_step()
                    self.ops.embedding(tokens, table)

                yield self.row("embedding", f"{name} m={m}", call, m * k * 4, 0, "f32")

    def attention(self, g: torch.Generator) -> Iterator[Row]:
        """Decode and prefill at several lengths and block sizes."""
        from op_cases import reference as cases

        batches = {
            "decode 1 x 1024": ((1, 1024),),
            "decode 16 x 512": ((1, 512),) * 16,
            "decode 32 x 4096": ((1, 4096),) * 32,
            "decode 4 x 8192": ((1, 8192),) * 4,
            "prefill 512": ((512, 512),),
            "prefill 2048": ((2048, 2048),),
            "prefill 512 of 4096": ((512, 4096),),
        }
        for block_size in (16, 1):
            layout = KVLayout(block_size, KV_HEADS, HEAD_DIM, BF16)
            for name, rows in batches.items():
                if block_size == 1 and rows[0][1] > 1024:
                    continue
                case = {k: arrays(v) for k, v in cases.attention_case(g, layout, HEADS, rows, garbage=False).items()}
                size = sum(context for _, context in rows) * layout.bytes_per_token
                seen = sum(new * (context - new) + new * (new + 1) / 2 for new, context in rows)
                work = 4 * HEADS * HEAD_DIM * seen

                def call(case: Case = case) -> None:
                    self.ops.begin_step()
                    self.ops.attention(**case)

                yield self.row("attention", f"{name}, block {block_size}", call, size, work, "bf16")

    def rows_of(self, g: torch.Generator) -> Iterator[Row]:
        """The ops between the matrices, which are bound by memory or by the call itself."""
        from op_cases import reference as cases

        d, f = 2048, 8192
        layout = KVLayout(16, KV_HEADS, HEAD_DIM, BF16)
        for m in (1, 16, 512):
            norm = (normal(g, m, d), normal(g, m, d), torch.ones(d), 1e-5)
            qkv = normal(g, m, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
            table, cache = cases.rope_table(m, HEAD_DIM // 2), allocate(layout, -(-m // 16))
            rope = (qkv, torch.arange(m, dtype=torch.int32), table, torch.arange(m), cache, None, 1e-5)
            yield self._plain_row("add_rmsnorm", norm, m, 16 * m * d)
            yield self._plain_row("gated_activation", (normal(g, m, 2 * f), "silu"), m, 12 * m * f)
            yield self._plain_row("rope_and_cache", rope, m, 8 * qkv.numel())

    def _plain_row(self, name: str, args: tuple[Any, ...], m: int, size: int) -> Row:
        op = getattr(self.ops, name)

        own = arrays(args)

        def call() -> None:
            self.ops.begin_step()
            op(*own)

        return self.row(name, f"m={m}", call, size, 0, "f32")


def show(console: Console, limits: Limits, rows: list[Row]) -> None:
    """The table of all rows under the machine's limits."""
    peaks = ", ".join(f"{op.removeprefix('probe_')} {value:.0f} GOP/s" for op, value in limits.probes.items())
    table = Table(title=f"limits at the start: read {limits.read:.1f} GB/s, {peaks}")
    for name in ("op", "case", "median us", "best us", "GB/s", "GOP/s", "of limit"):
        table.add_column(name, justify="left" if name in ("op", "case") else "right", no_wrap=True)
    for r in rows:
        figures = (
            f"{r.median_us:.1f}",
            f"{r.best_us:.1f}",
            f"{r.gb_per_s:.1f}",
            f"{r.gop_per_s:.0f}",
            f"{r.share:.0%}",
        )
        table.add_row(r.op, r.case, *figures)
    console.print(table)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=0, help="threads (0: all cores)")
    parser.add_argument("--isa", default="auto", help=f"instruction-set unit: auto, {', '.join(UNITS)}")
    parser.add_argument("--seconds", type=float, default=0.3, help="time per measurement")
    parser.add_argument("--only", default="", help="only ops whose name begins with this")
    parser.add_argument(
        "--kinds", nargs="+", default=[*(kind for kind, _ in KINDS), *SUPER_FORMS], help="weights of linear"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of linear and embedding")
    parser.add_argument("--output", type=Path, default=Path("results/kernels.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    ops = open_backend(DeviceConfig(device="cpu", threads=options.threads, isa=options.isa, bf16_bits=12))
    bench = Bench(ops, options.seconds, options.kinds, options.rows)
    g = torch.Generator().manual_seed(0)
    parts = {"linear": bench.linear, "embedding": bench.embedding, "attention": bench.attention, "rows": bench.rows_of}
    rows = [row for name, part in parts.items() if name.startswith(options.only) for row in part(g)]
    show(Console(width=None if sys.stdout.isatty() else 110), bench.limits, rows)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    machine = {"machine": platform.machine(), "isa": ops.isa, "threads": ops.threads}
    report = {
        **machine,
        "limits": asdict(bench.limits) | {"peak": bench.limits.peak},
        "rows": [asdict(row) | {"share": row.share} for row in rows],
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
