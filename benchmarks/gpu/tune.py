"""Sizes of the GPU's kernels by measurement: `check.py --tune` writes what it finds into ops/triton/configs.

A search that knows no kernel: an op runs, the rows of sizes that it asked for are noted, and each size of each row is
doubled, halved, or moved by one, as long as that is faster and the result stays close to what it was. Serving never
does this; it reads the rows.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.core.dtypes import BF16
from quire.ops.layout import KVCache, PlainLayout
from quire.ops.op import IMPLEMENTATIONS, REGISTRY, load_definitions
from quire.ops.triton.backend import GpuOps
from quire.ops.triton.gpu import Gpu, load_kernels, open_gpu

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from op_cases.weights import random_weight

CONFIGS = Path(__file__).parents[2] / "src" / "quire" / "ops" / "triton" / "configs"
"""Of the source: what runs may be an installed copy."""
Key = tuple[Any, ...]
ROWS = (1, 16, 64, 512, 4096)
NO_LIMIT = 1 << 30
FASTER = 0.98
"""A change must save 2 %: less is noise."""


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


def neighbours(sizes: dict[str, int]) -> Iterator[dict[str, int]]:
    """Rows that differ in one size."""
    for name, value in sizes.items():
        for other in (value * 2, value // 2) if value >= 8 else (value + 1, value - 1, value * 2):
            if other >= 1:
                yield sizes | {name: other}


def improve(gpu: Gpu, key: Key, run: Callable[[], Tensor], time: Callable[[Callable[[], Any]], float]) -> float:
    """Put the best sizes found for `key` in place; returns time before / time after."""
    expected, before = run().float(), time(run)
    best, moved = before, True
    while moved:
        moved = False
        for sizes in neighbours(dict(gpu.chosen[key])):
            kept, gpu.chosen[key] = gpu.chosen[key], sizes
            try:
                error = float((run().float() - expected).abs().max() / expected.abs().max().clamp(min=1e-9))
                took = time(run) if error < 2e-2 else float("inf")
            except Exception:  # sizes that do not compile or do not fit: any kind of error says so
                took = float("inf")
            if took < best * FASTER:
                best, moved = took, True
            else:
                gpu.chosen[key] = kept
    return before / best


def problems(gpu: Gpu, dry: bool) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Calls that matter: (name, call) for the matrices and the attention of Llamas of 1 and 8 G parameters."""
    from op_cases.reference import attention_case

    ops, g = GpuOps(gpu, missing()), torch.Generator().manual_seed(0)
    shapes = ((64, 32),) if dry else ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096),
                                      (3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))  # fmt: skip
    for kind in ("bf16", "int4", "int8"):
        for n, k in shapes:
            weight = ops.pack(random_weight(g, kind, n, k, 32 if dry else 128, bits=16))
            for m in (2,) if dry else ROWS:
                x = torch.randn((m, k), generator=g).to(gpu.device, torch.bfloat16)
                yield f"linear {kind} {n}x{k} m={m}", lambda x=x, w=weight: ops.linear(x, w, None)  # type: ignore[misc]
    for d in (16,) if dry else (64, 128):
        for rows in (((1, 20),) * 2,) if dry else (((1, 4096),) * 64, ((4096, 4096),)):
            layout = PlainLayout(16, 2 if dry else 8, d, BF16)
            case = attention_case(g, layout, 4 if dry else 32, rows, garbage=False)
            cache = KVCache(layout, case["cache"].keys.to(gpu.device), case["cache"].values.to(gpu.device))
            args = {key: v.to(gpu.device) if isinstance(v, Tensor) else v for key, v in case.items()}
            args |= {"cache": cache, "qkv": args["qkv"].bfloat16()}
            yield f"attention {d} {rows[0]}", lambda args=args: ops.attention(**args)  # type: ignore[misc]


def tune(scale: Scale) -> None:
    """Search, and write rows for this device in front of the others; `--dry` writes nothing."""
    gpu = open_gpu()
    for name, run in problems(gpu, scale.dry):
        known = set(gpu.chosen)
        run()
        for key in [key for key in gpu.chosen if key not in known]:
            if scale.dry:
                tell(**{f"{name}: {key}": next(neighbours(gpu.chosen[key]))})
                continue
            gain = improve(gpu, key, run, lambda fn: seconds(fn, 10))
            tell(**{f"{name}: {key}": {"gain": round(gain, 3)} | gpu.chosen[key]})
            keep(gpu, key)


def keep(gpu: Gpu, key: Key) -> None:
    """Write the sizes of `key` as a row of this device, in place of one for the same facts.

    A row for m rows of a batch serves fewer, down to those of the next row, and the largest serves all that are larger.
    """
    kernel, *facts = key
    path = CONFIGS / f"{kernel}.json"
    most = {m: m for m in ROWS} | {ROWS[-1]: NO_LIMIT}
    when = {fact: [0, most[value]] if fact == "m" else [value, value] for fact, value in facts}
    rows = json.loads(path.read_text())
    own = [r for r in rows if r.get("device") == gpu.name and r["when"] != when]
    own.append({"device": gpu.name, "when": when, "use": gpu.chosen[key]})
    own.sort(key=lambda row: row["when"].get("m", [0, 0])[1])
    others = [r for r in rows if r.get("device") != gpu.name]
    path.write_text("[\n  " + ",\n  ".join(json.dumps(row) for row in own + others) + "\n]\n")
