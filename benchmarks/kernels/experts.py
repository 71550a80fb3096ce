"""A layer of experts as quire runs it, beside a loop over experts in Python, and attention over latents.

    python -m benchmarks.kernels.experts [--threads N] [--isa avx512] [--kinds int4 bf16] [--experts 128]

The layer has the sizes of Qwen3-30B-A3B (hidden 2,048, 128 experts of width 768, 8 a token). The loop takes the same
native linear for each expert in use and torch for the rest, which is what an engine without a grouped op does. Both are
timed in turn and the median of the ratios is given, and the bytes of weights read per second (an estimate of those in
use), with one row also as a share of what a plain reading loop reaches in the same rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from quire.core.config import DeviceConfig
from quire.core.dtypes import BF16
from quire.ops.arrays import Host
from quire.ops.backend import Ops, open_backend
from quire.ops.cpu.thread_probe import read_rate
from quire.ops.experts import ExpertActivation, Grouped, Routing
from quire.ops.latents import LatentLayout
from quire.ops.native import huge_bytes
from quire.ops.weights import Weight

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from op_cases.weights import random_weight
from over_torch import arrays

HIDDEN, WIDTH, TOP_K = 2048, 768, 8
ROWS = (1, 16, 512)
GROUP = 128


class Layer:
    """Experts of one weight kind: one packed buffer for the grouped op, one `Packed` each for the loop."""

    def __init__(self, ops: Ops, kind: str, experts: int) -> None:
        g = torch.Generator().manual_seed(0)
        self.ops, self.routing = ops, Routing(experts, TOP_K, renormalize=True)
        up = [arrays(random_weight(g, kind, 2 * WIDTH, HIDDEN, GROUP)) for _ in range(2)]
        down = [arrays(random_weight(g, kind, HIDDEN, WIDTH, GROUP)) for _ in range(2)]
        self.up = [ops.pack(up[e % 2]) for e in range(experts)]
        self.down = [ops.pack(down[e % 2]) for e in range(experts)]
        self.gate_up, self.back = self._grouped(up, experts), self._grouped(down, experts)
        self.expert_bytes = self.up[0].nbytes + self.down[0].nbytes

    def _grouped(self, pair: list[Weight], experts: int) -> Grouped:
        first, n = pair[0], pair[0].shape[0]
        codes = np.concatenate([pair[e % 2].codes for e in range(experts)])
        stacked = [w.scales for w in (pair[e % 2] for e in range(experts)) if w.scales is not None]
        scales = np.concatenate(stacked) if stacked else None
        packed = self.ops.pack(Weight(first.kind, codes, scales, group=first.group))
        return self.ops.group(packed, experts, n, None)

    def grouped(self, x: Host, logits: Host) -> Host:
        """As `model.moe` does."""
        ops = self.ops
        ids, weights = ops.route(logits, None, self.routing)
        choices = (*ops.sort_by_expert(ids, self.routing.experts), weights)
        return ops.expert_mlp(x, self.gate_up, self.back, ExpertActivation("silu"), choices)  # type: ignore[no-any-return]

    def loop(self, x: Host, logits: Host) -> Host:
        """One expert after the other, as far as any token wants it."""
        ops, out = self.ops, np.zeros_like(x)
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_K]
        top = np.take_along_axis(logits, ids, 1)
        weights = np.exp(top - top.max(1, keepdims=True))
        weights = weights / weights.sum(1, keepdims=True)
        for e in np.unique(ids).tolist():
            token, choice = np.where(ids == e)
            y = ops.linear(x[token], self.up[e], None)
            y = ops.linear(ops.gated_activation(y, "silu"), self.down[e], None)
            out[token] += y * weights[token, choice, None]
        return out


def timed(ops: Ops, fn: Callable[[], Host]) -> float:
    """Seconds of one call."""
    ops.begin_step()
    started = time.perf_counter()
    fn()
    return time.perf_counter() - started


def share_of_reads(ops: Ops, layer: Layer, memory: Host, rounds: int) -> float:
    """Bytes of the experts that one row touches per second, as a share of what plain loops read in the same rounds."""
    g = np.random.default_rng(0)
    shares, x = [], g.standard_normal((1, HIDDEN), np.float32)
    for _ in range(rounds):
        logits = [g.standard_normal((1, layer.routing.experts), np.float32) for _ in range(16)]
        took = statistics.median(timed(ops, lambda row=row: layer.grouped(x, row)) for row in logits)  # type: ignore[misc]
        shares.append(TOP_K * layer.expert_bytes / took / read_rate(ops.native, memory))
    return statistics.median(shares)


def compare(ops: Ops, layer: Layer, rows: int, seconds: float) -> tuple[float, float, float]:
    """Median seconds of the grouped op and of the loop, and the median of their ratios (loop / grouped)."""
    g = np.random.default_rng(rows)
    x = g.standard_normal((rows, HIDDEN), np.float32)
    logits = g.standard_normal((rows, layer.routing.experts), np.float32)
    ops.begin_step()
    found, expected = layer.grouped(x, logits).copy(), layer.loop(x, logits)
    assert float(np.abs(found - expected).max() / np.abs(expected).max()) < 1e-3
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(pairs) < 5 or time.perf_counter() < end:
        g.standard_normal(out=x, dtype=np.float32)
        g.standard_normal(out=logits, dtype=np.float32)  # other experts, so that weights come from memory
        pairs.append((timed(ops, lambda: layer.grouped(x, logits)), timed(ops, lambda: layer.loop(x, logits))))
    grouped, loop = (statistics.median(p[i] for p in pairs) for i in range(2))
    return grouped, loop, statistics.median(b / a for a, b in pairs)


def latents(ops: Ops, seconds: float) -> Iterator[str]:
    """Attention of DeepSeek-V2-Lite (16 heads) and V3 (128 heads) over bf16 latents."""
    from op_cases.mla import latent_case

    for heads in (16, 128):
        for name, rows in (("decode 1 x 4096", ((1, 4096),)), ("decode 16 x 1024", ((1, 1024),) * 16),
                           ("prefill 512", ((512, 512),))):  # fmt: skip
            layout = LatentLayout(16, 1, 64, BF16, rank=512)
            made = latent_case(torch.Generator().manual_seed(0), layout, heads, 192, rows)
            case = {name: arrays(value) for name, value in made.items()}
            times = [timed(ops, lambda case=case: ops.latent_attention(**case)) for _ in range(3)]  # type: ignore[misc]
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                times.append(timed(ops, lambda case=case: ops.latent_attention(**case)))  # type: ignore[misc]
            seen = sum(new * (context - new) + new * (new + 1) / 2 for new, context in rows)
            took = statistics.median(times)
            work, size = 2 * heads * seen * (512 + 64 + 512), sum(c for _, c in rows) * layout.bytes_per_token
            yield (f"{heads:4d} heads, {name:16s} {took * 1e6:10.0f} us {work / took / 1e9:8.0f} GFLOP/s "
                   f"{size / took / 1e9:7.1f} GB/s")  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=0, help="threads (0: all cores)")
    parser.add_argument("--isa", default="auto", help="instruction-set unit")
    parser.add_argument("--seconds", type=float, default=0.5, help="time per measurement")
    parser.add_argument("--kinds", nargs="*", default=["int4", "int8", "bf16"], help="weight kinds")
    parser.add_argument("--experts", type=int, default=128, help="experts of the layer (128 of bf16 take 1.2 GB twice)")
    options = parser.parse_args()
    ops = open_backend(DeviceConfig(device="cpu", threads=options.threads, isa=options.isa))
    for kind in options.kinds:
        layer = Layer(ops, kind, options.experts)
        for rows in ROWS:
            grouped, loop, ratio = compare(ops, layer, rows, options.seconds)
            used = layer.expert_bytes * options.experts * (1 - (1 - TOP_K / options.experts) ** rows)
            print(f"{kind:5s} rows {rows:4d}: grouped {grouped * 1e6:9.0f} us ({used / grouped / 1e9:5.1f} GB/s), "
                  f"loop {loop * 1e6:9.0f} us, ratio {ratio:.2f}")  # fmt: skip
        if ops.timed:
            memory = huge_bytes(768 << 20)
            memory.fill(0)
            print(f"{kind:5s} rows    1: {share_of_reads(ops, layer, memory, 9):.0%} of what a plain loop reads")
            del memory
        del layer
    for line in latents(ops, options.seconds):
        print(line)


if __name__ == "__main__":
    main()
