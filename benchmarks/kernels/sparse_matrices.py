"""Matrices without their zeros beside the same matrices with them: from which share of zeros that pays.

    python -m benchmarks.kernels.sparse_matrices                 every kind, share and number of rows
    python -m benchmarks.kernels.sparse_matrices --only int8 --rows 1 --rounds 31

Both packings of one weight are multiplied in turn, so that what else the machine does falls on both; a weight has so
many copies that none is cached when its turn comes again, as in a decode. A row has the bytes of both, the medians, and
how much faster the one without zeros is (the median of the ratios of neighbouring calls; above 1: it pays). Zeros are
scattered at random, but for "2:4": two of each four columns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.common.results import RESULTS
from quire.core.config import DeviceConfig
from quire.ops.arrays import Host
from quire.ops.backend import Ops, open_backend
from quire.ops.cpu.pack import pack_dense
from quire.ops.cpu.pack_sparse import SPARSE
from quire.ops.weights import Packed, Weight

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from op_cases.weights import normal, random_weight
from over_torch import arrays

COLD_BYTES = 160 << 20
"""All copies of a dense matrix: more than the last-level cache of the machines in mind."""
SHARES = ("0", "0.2", "0.3", "0.4", "2:4", "0.5", "0.6", "0.75", "0.9")


@dataclass(frozen=True)
class Row:
    """Medians in milliseconds; `faster`: dense by sparse; bytes a weight of both, scales among them."""

    kind: str
    zeros: str
    rows: int
    dense_ms: float
    sparse_ms: float
    faster: float
    dense_bytes: float
    sparse_bytes: float


def pruned(kind: str, n: int, k: int, group: int, zeros: str) -> Weight:
    """A random weight with that share of zeros."""
    g = torch.Generator().manual_seed(0)
    weight = random_weight(g, kind, n, k, group)
    codes = torch.where(weight.codes == 0, torch.ones_like(weight.codes), weight.codes)
    noise = torch.rand(n, k, generator=g)
    if zeros == "2:4":
        kept = noise.view(n, k // 4, 4).argsort(-1).argsort(-1).view(n, k) < 2
    else:
        kept = noise >= float(zeros)
    return arrays(replace(weight, codes=codes * kept))  # type: ignore[no-any-return]


def seconds(ops: Ops, x: Host, packed: Packed) -> float:
    """Of one product."""
    ops.begin_step()
    started = time.perf_counter()
    ops.linear(x, packed, None)
    return time.perf_counter() - started


def measure(ops: Ops, weight: Weight, zeros: str, rows: list[int], rounds: int) -> list[Row]:
    """One weight in both packings, `rounds` times over its copies."""
    (n, k), first = weight.shape, pack_dense(ops.cpu, weight)
    copies = max(2, -(-COLD_BYTES // first.nbytes))
    pairs = [(pack_dense(ops.cpu, weight), ops.pack(weight)) for _ in range(copies)]
    found = list[Row]()
    for m in rows:
        x = normal(torch.Generator().manual_seed(m), m, k).numpy()
        times = [[seconds(ops, x, packed) for packed in pairs[i % copies]] for i in range(rounds * copies)][copies:]
        dense, sparse = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        faster = statistics.median(a / b for a, b in times)
        sizes = [packed.nbytes / (n * k) for packed in pairs[0]]
        found.append(Row(weight.kind, zeros, m, dense, sparse, faster, *sizes))
    return found


def main() -> None:
    """Measure, print, write JSON."""
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SPARSE, default=list(SPARSE))
    parser.add_argument("--zeros", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 512])
    parser.add_argument("--shape", nargs=2, type=int, default=[8192, 2048], metavar=("N", "K"))
    parser.add_argument("--group", type=int, choices=(32, 64, 128), default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--output", type=Path, default=RESULTS / "sparse.json")
    args = parser.parse_args()
    ops, rows = open_backend(DeviceConfig(device="cpu", isa=args.isa, threads=args.threads, sparse="on")), list[Row]()
    n, k = args.shape
    for kind in args.only:
        for zeros in args.zeros:
            weight = pruned(kind, n, k, args.group, zeros)
            for row in measure(ops, weight, zeros, args.rows, args.rounds):
                rows.append(row)
                print(
                    f"{kind:5s} zeros {zeros:5s} rows {row.rows:4d}  dense {row.dense_ms:8.3f} ms  sparse "
                    f"{row.sparse_ms:8.3f} ms  faster {row.faster:5.2f}  bytes a weight {row.dense_bytes:.3f} -> "
                    f"{row.sparse_bytes:.3f}",
                    flush=True,
                )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
