"""Native ops against the limits of this machine: read bandwidth through huge pages and the peak of each product.

    python -m benchmarks.kernels.cpu_ops [--threads N] [--isa avx512] [--seconds 0.3] [--output results/kernels.json]
    python -m benchmarks.kernels.cpu_ops --only linear --kinds fp8 int8 --rows 1 16 512
    python -m benchmarks.kernels.cpu_ops --only pack --sources Q4_K "bf16 to int4 g32"

A row says how long an op took (median and best), the bytes of weights or cache it must read and the operations it must
do, per second, and the larger of the two shares of the machine's limit. Shapes are those of a Llama of 1 G parameters.
Weights rotate through more memory than the caches hold. Run it on a quiet machine; where others use it too, `cpu us`,
the processor time of a call, says more than its length.

`latents` is attention over the latents of DeepSeek-V2-Lite (16 heads) and V3 (128 heads), `indexer` is the choice of
tokens of DeepSeek-V3.2, and attention to these. `recurrent` is the delta rule
and selective scans; their bytes are those of states, read and written, and of rows. `pack` is what the loader
does with one matrix: GGUF blocks to super-blocks or integers, bf16 rounded to int4 or int8, or kept. Its bytes are
those of the file and the packed ones; each target is fresh memory, as at a load.
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
from quire.ops.arrays import Host, to_numpy
from quire.ops.backend import Ops, open_backend
from quire.ops.cpu.thread_probe import best_seconds, read_rate
from quire.ops.kinds import SUPER_KINDS
from quire.ops.latents import LatentLayout
from quire.ops.layout import KVLayout
from quire.ops.native import UNITS, huge_bytes
from quire.ops.op import Case
from quire.ops.weights import Packed, PackedTable, Weight
from quire.quant.base import QWeight
from quire.quant.gguf import TYPES, Block
from quire.quant.registry import DENSE, QUANTIZERS

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from benchmarks.kernels.row_ops import HEAD_DIM, HEADS, KV_HEADS, Calls, indexer_calls, recurrent_calls, row_calls
from op_cases.weights import normal
from over_torch import arrays

READ_BYTES = 768 << 20
COLD_BYTES = 512 << 20
"""Weights of one measurement: more than the last-level cache of the machines in mind."""
PACK_BYTES = 160 << 20
"""Sources of what is packed."""
MAX_COPIES = 32
KINDS = (("bf16", 0), ("bf12", 0), ("fp8", 128), ("int8", 32), ("int8", 128), ("int4", 32), ("int4", 128))
SUPER_FORMS = {kind: form for form, kind in SUPER_KINDS.items()}
SHAPES = ((2048, 2048), (8192, 2048), (2048, 8192), (32000, 2048))
ROWS = (1, 4, 16, 64, 512)
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
    """One measurement: microseconds, GB/s, G operations/s, microseconds of processors, and the larger share of the
    limit (1 = the limit).

    `read` and `peak` are the limits measured right before and after the row, the better of both: on a machine that is
    shared they change within seconds.
    """

    op: str
    case: str
    median_us: float
    best_us: float
    gb_per_s: float
    gop_per_s: float
    cpu_us: float
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


@dataclass(frozen=True)
class Source:
    """What a file holds of a matrix of n rows and k columns, and what the loader makes of it."""

    source: Callable[[int, int], torch.Tensor]
    weight: Callable[[torch.Tensor], QWeight]


HIGH_BYTES = {"Q2_K": (81, 83), "Q3_K": (109,), "Q6_K": (209,), "IQ1_M": (55,), "TQ1_0": (53,), "TQ2_0": (65,),
              "MXFP4": (0,), **dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (1, 3))}  # fmt: skip
"""Bytes of a block with the exponents of its scales, where that is not its second."""


def blocks(name: str) -> Source:
    """Random blocks of ggml's type `name`."""
    kind = TYPES[name]

    def source(n: int, k: int) -> torch.Tensor:
        raw = torch.randint(0, 256, (n, k // kind.numbers, kind.nbytes), dtype=torch.uint8)
        for at in HIGH_BYTES.get(name, (1,)):
            raw[..., at] = 0x2C  # in float16 of the size of 0.07
        return raw.flatten(1)

    return Source(source, lambda raw: Block(kind).load({name: to_numpy(raw)}, BF16))


def numbers(dtype: torch.dtype, to: str, group: int = 0) -> Source:
    """Normal numbers in `dtype`, kept in bf16 or rounded."""

    def weight(w: torch.Tensor) -> QWeight:
        return DENSE.load({"weight": to_numpy(w)}, BF16) if to == "bf16" else QUANTIZERS[to].at_pack(to_numpy(w), group)

    return Source(lambda n, k: (0.05 * torch.randn(n, k)).to(dtype), weight)


PACKED = {name: blocks(name) for name in TYPES} | {
    "bf16 to int4 g32": numbers(torch.bfloat16, "int4", 32), "bf16 to int4 g128": numbers(torch.bfloat16, "int4", 128),
    "bf16 to int8 g32": numbers(torch.bfloat16, "int8", 32), "bf16": numbers(torch.bfloat16, "bf16"),
    "f16 to bf16": numbers(torch.float16, "bf16"), "f32 to int4 g32": numbers(torch.float32, "int4", 32),
}  # fmt: skip


class Bench:
    """Times calls for a fixed wall-clock time each and turns them into rows."""

    def __init__(
        self, ops: Ops, seconds: float, kinds: Collection[str], rows: Sequence[int], sources: Collection[str] = ()
    ) -> None:
        self.ops, self.cpu, self.seconds = ops, ops.cpu, seconds
        self.kinds, self.rows, self.sources = kinds, rows, sources
        self._data = huge_bytes(READ_BYTES)
        self._data.fill(0)
        self.limits = self.limits_of("f32", "bf16", "int8")

    def times(self, fn: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> list[tuple[float, float]]:
        """Seconds of each call and those of processors, at least three, after one that warms up; `before` each call."""
        before()
        fn()
        found: list[tuple[float, float]] = []
        end = time.perf_counter() + self.seconds
        while len(found) < 3 or time.perf_counter() < end:
            before()
            busy, begin = time.process_time(), time.perf_counter()
            fn()
            found.append((time.perf_counter() - begin, time.process_time() - busy))
        return found

    def row(
        self, op: str, case: str, fn: Callable[[], Any], size: float, work: float, peak: str, calls: int = 1
    ) -> Row:
        """`fn` makes `calls` calls that each read `size` bytes and do `work` operations of kind `peak`."""
        return self._row(op, case, lambda: self.times(fn), (size, work, peak, calls))

    def _row(
        self, op: str, case: str, times: Callable[[], list[tuple[float, float]]], does: tuple[float, float, str, int]
    ) -> Row:
        size, work, peak, calls = does
        before = self.limits_of(peak)
        found = times()
        after = self.limits_of(peak)
        best, median = min(found)[0] / calls, statistics.median(each[0] for each in found) / calls
        busy = statistics.median(each[1] for each in found) / calls
        limits = (max(before.read, after.read), max(before.peak[peak], after.peak[peak]))
        return Row(op, case, median * 1e6, best * 1e6, size / best / 1e9, work / best / 1e9, busy * 1e6, *limits)

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

    def latents(self, g: torch.Generator) -> Iterator[Row]:
        """Attention over bf16 latents: decode and prefill."""
        from op_cases.mla import latent_case

        batches = {"decode 1 x 4096": ((1, 4096),), "decode 16 x 1024": ((1, 1024),) * 16, "prefill 512": ((512, 512),)}
        layout = LatentLayout(16, 1, 64, BF16, rank=512)
        for heads, (name, rows) in itertools.product((16, 128), batches.items()):
            case = {k: arrays(value) for k, value in latent_case(g, layout, heads, 192, rows).items()}
            seen = sum(new * (context - new) + new * (new + 1) / 2 for new, context in rows)
            size = sum(context for _, context in rows) * layout.bytes_per_token

            def call(case: Case = case) -> None:
                self.ops.begin_step()
                self.ops.latent_attention(**case)

            work = 2 * heads * seen * (512 + 64 + 512)
            yield self.row("latents", f"{heads} heads, {name}", call, size, work, "bf16")

    def pack(self, g: torch.Generator) -> Iterator[Row]:
        """Every source of weights, and two shapes."""
        for name, (n, k) in itertools.product(self.sources, ((8192, 2048), (2048, 8192))):
            way = PACKED[name]
            first = way.source(n, k)
            files = itertools.cycle([first, *(first.clone() for _ in range(PACK_BYTES // first.nbytes + 1))])
            kept: list[Packed] = []
            packed = way.weight(first).pack(self.ops)
            size = first.nbytes + packed.nbytes
            del packed

            def times(way: Source = way, files: Iterator[Any] = files, kept: list[Packed] = kept) -> Any:
                # What the last call packed goes back to the system before the clock runs.
                return self.times(lambda: kept.append(way.weight(next(files)).pack(self.ops)), kept.clear)

            yield self._row("pack", f"{name} {n}x{k}", times, (size, 0, "f32", 1))

    def calls(self, calls: Calls) -> Row:
        """The calls of an op one after the other."""
        op, given = getattr(self.ops, calls.op), arrays(calls.args)

        def call() -> None:
            for args in given:
                self.ops.begin_step()
                op(*args)

        return self.row(calls.op, calls.case, call, calls.size, calls.work, "f32", len(given))


def show(console: Console, limits: Limits, rows: list[Row]) -> None:
    """The table of all rows under the machine's limits."""
    peaks = ", ".join(f"{op.removeprefix('probe_')} {value:.0f} GOP/s" for op, value in limits.probes.items())
    table = Table(title=f"limits at the start: read {limits.read:.1f} GB/s, {peaks}")
    for name in ("op", "case", "median us", "best us", "cpu us", "GB/s", "GOP/s", "of limit"):
        table.add_column(name, justify="left" if name in ("op", "case") else "right", no_wrap=True)
    for r in rows:
        us = (f"{value:.1f}" for value in (r.median_us, r.best_us, r.cpu_us))
        figures = (*us, f"{r.gb_per_s:.1f}", f"{r.gop_per_s:.0f}", f"{r.share:.0%}")
        table.add_row(r.op, r.case, *figures)
    console.print(table)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=0, help="threads (0: all cores)")
    parser.add_argument("--isa", default="auto", help=f"instruction-set unit: auto, {', '.join(UNITS)}")
    parser.add_argument("--seconds", type=float, default=0.3, help="time per measurement")
    parser.add_argument("--only", default="", help="only ops whose name begins with this")
    kinds = [*dict.fromkeys(kind for kind, _ in KINDS), *SUPER_FORMS]
    parser.add_argument("--kinds", nargs="+", default=kinds, help="weights of linear")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of linear and embedding")
    parser.add_argument("--sources", nargs="+", choices=PACKED, default=list(PACKED), help="what pack packs")
    parser.add_argument("--bf16-bits", type=int, choices=(12, 16), default=12, help="that pack packs bf16 in")
    parser.add_argument("--output", type=Path, default=Path("results/kernels.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    ops = open_backend(
        DeviceConfig(device="cpu", threads=options.threads, isa=options.isa, bf16_bits=options.bf16_bits)
    )
    bench = Bench(ops, options.seconds, options.kinds, options.rows, options.sources)
    g = torch.Generator().manual_seed(0)
    parts = {"linear": bench.linear, "embedding": bench.embedding, "attention": bench.attention,
             "latents": bench.latents, "rows": lambda g: map(bench.calls, row_calls(g)),
             "recurrent": lambda g: map(bench.calls, recurrent_calls(g)), "pack": bench.pack,
             "indexer": lambda g: map(bench.calls, indexer_calls(g))}  # fmt: skip
    rows = [row for name, part in parts.items() if name.startswith(options.only) for row in part(g)]
    show(Console(width=None if sys.stdout.isatty() else 110), bench.limits, rows)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": platform.machine(), "isa": ops.isa, "threads": ops.threads,
              "limits": asdict(bench.limits) | {"peak": bench.limits.peak},
              "rows": [asdict(row) | {"share": row.share} for row in rows]}  # fmt: skip
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
