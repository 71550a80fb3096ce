"""Packing of matrices out of what their file holds, beside the rate at which this machine reads memory.

    python -m benchmarks.kernels.weight_packing                               every path, both shapes
    python -m benchmarks.kernels.weight_packing --only Q4_K Q6_K --rounds 9

A path is what the loader does with one matrix: GGUF blocks to super-blocks or integers, bf16 rounded to int4 or int8,
bf16 as it is or in 12 bits. Sources rotate through more memory than the caches hold; every target is fresh memory, as
at a load (the system clears its pages at their first touch, which is in the time). A row has the bytes of the file per
second, those bytes and the packed ones, and the latter as a share of the rate of reading memory, measured between the
calls: the bar is 0.5. On a machine that others use too, the seconds of processors that a call takes tell more than its
length: "cpu" is both kinds of bytes for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common.results import RESULTS
from quire.core.config import DeviceConfig
from quire.core.dtypes import BF16
from quire.ops.arrays import Host, to_numpy
from quire.ops.backend import Ops, open_backend
from quire.ops.cpu.thread_probe import read_rate
from quire.ops.native import huge_bytes
from quire.ops.weights import Packed
from quire.quant.base import QWeight
from quire.quant.gguf import TYPES, Block
from quire.quant.registry import DENSE, QUANTIZERS

SHAPES = ((8192, 2048), (2048, 8192))
COLD_BYTES = 160 << 20
"""Sources of one path: more than the last-level cache of the machines in mind."""
READ_BYTES = 256 << 20
UNITS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
}
"""Bytes of a block at which its float16 numbers lie, where that is not its first."""


@dataclass(frozen=True)
class Way:
    """A source of a shape, and what makes a weight of it."""

    source: Callable[[int, int], Tensor]
    weight: Callable[[Tensor], QWeight]


@dataclass(frozen=True)
class Row:
    """Medians: milliseconds; GB/s of the file's bytes, of all, and of all for a second of one processor; those of
    reading memory, and the share of it."""

    path: str
    shape: tuple[int, int]
    ms: float
    file_gb_per_s: float
    gb_per_s: float
    gb_per_cpu_s: float
    read: float
    share: float


def blocks(name: str) -> Way:
    """Random blocks of ggml's type `name`."""
    kind = TYPES[name]

    def source(n: int, k: int) -> Tensor:
        raw = torch.randint(0, 256, (n, k // kind.numbers, kind.nbytes), dtype=torch.uint8)
        for at in UNITS.get(name, (0,)):
            raw[..., at + 1] = 0x2C  # of the size of 0.07
        return raw.flatten(1)

    return Way(source, lambda raw: Block(kind).load({name: to_numpy(raw)}, BF16))


def numbers(dtype: torch.dtype, to: str, group: int = 0) -> Way:
    """Normal numbers in `dtype`, kept in bf16 or rounded."""

    def weight(w: Tensor) -> QWeight:
        return DENSE.load({"weight": to_numpy(w)}, BF16) if to == "bf16" else QUANTIZERS[to].at_pack(to_numpy(w), group)

    return Way(lambda n, k: (0.05 * torch.randn(n, k)).to(dtype), weight)


PATHS = {name: blocks(name) for name in TYPES} | {
    "bf16 to int4 g32": numbers(torch.bfloat16, "int4", 32),
    "bf16 to int4 g128": numbers(torch.bfloat16, "int4", 128),
    "bf16 to int8 g32": numbers(torch.bfloat16, "int8", 32),
    "bf16": numbers(torch.bfloat16, "bf16"),
    "f16 to bf16": numbers(torch.float16, "bf16"),
    "f32 to int4 g32": numbers(torch.float32, "int4", 32),
}


def measure(ops: Ops, name: str, shape: tuple[int, int], rounds: int, memory: Host) -> Row:
    """One path, `rounds` times over all sources."""
    first = PATHS[name].source(*shape)
    sources = [first] + [first.clone() for _ in range(max(1, COLD_BYTES // first.nbytes))]
    kept: list[Packed | None] = [None] * len(sources)
    times, processors, reads, packed_bytes = list[float](), list[float](), list[float](), 0
    for _ in range(rounds + 1):
        reads.append(read_rate(ops.native, memory))
        for i, source in enumerate(sources):
            kept[i] = None  # its memory goes back before the clock runs
            started, busy = time.perf_counter(), time.process_time()
            packed = PATHS[name].weight(source).pack(ops)
            times.append(time.perf_counter() - started)
            processors.append(time.process_time() - busy)
            kept[i], packed_bytes = packed, packed.nbytes
    seconds, read = statistics.median(times[len(sources) :]), statistics.median(reads)
    both, busy = first.nbytes + packed_bytes, statistics.median(processors[len(sources) :])
    rates = (first.nbytes / seconds, both / seconds, both / busy, read)
    return Row(name, shape, 1e3 * seconds, *(rate / 1e9 for rate in rates), both / seconds / read)


def main() -> None:
    """Measure, print, write JSON."""
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bf16-bits", type=int, choices=(12, 16), default=DeviceConfig().bf16_bits)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "packing.json")
    args = parser.parse_args()
    ops = open_backend(DeviceConfig(device="cpu", threads=args.threads, bf16_bits=args.bf16_bits))
    memory, rows = huge_bytes(READ_BYTES), list[Row]()
    memory.fill(0)
    for name in args.only:
        for shape in SHAPES:
            row = measure(ops, name, shape, args.rounds, memory)
            rows.append(row)
            print(
                f"{name:17s} {shape[0]:5d} x {shape[1]:<5d} {row.ms:8.2f} ms  file {row.file_gb_per_s:6.2f}  both "
                f"{row.gb_per_s:6.2f}  cpu {row.gb_per_cpu_s:6.2f}  memory {row.read:5.1f} GB/s  share {row.share:.2f}",
                flush=True,
            )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
