"""Kernels of the CPU beside another way to the same result: both in turns, and how many times faster the second is.

    python -m benchmarks.kernels.compared shared --heads 32/8x64 16/8x128 --kv-dtype bf16 int8 --tokens 4096
    python -m benchmarks.kernels.compared blocks --heads 32/8x64 --tokens 1024 --sizes 16 1
    python -m benchmarks.kernels.compared experts --kinds int4 bf16 --rows 1 16 512
    python -m benchmarks.kernels.compared sparse --kinds int8 --rows 1 --rounds 15

    shared   attention of a decode step: copies of the leading blocks for each sequence, and blocks that all share
    blocks   the same step with blocks of each size
    experts  a layer of experts: a loop over experts in Python, and the grouped op
    sparse   matrices with their zeros and without them, by the share of zeros

`shared`, `blocks`: all sequences have `--tokens` tokens, in `shared` the same ones and `--own` of their own; the bits
of all ways must be equal. `experts` has the sizes of Qwen3-30B-A3B (hidden 2,048, experts of width 768, 8 a token); the
loop takes the same native linear for each expert in use. In `sparse` zeros are scattered at random, but for "2:4": two
of each four columns. Keys, values and weights are so many that none is found in the processor's caches when its turn
comes. A line has medians in milliseconds, and the median of the ratios of neighbouring calls; above 1: it pays.
`of reads`: bytes of the experts that were used a second, as a share of what a plain loop reads in the same minute.
Results: results/sparse.json has the rows of `sparse`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.results import parser_of
from quire.core.config import DeviceConfig
from quire.core.dtypes import BF16, F8, F16, F32, I8, I32
from quire.ops.arrays import Host, to_torch
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops, open_backend
from quire.ops.cpu.measure import read_rate
from quire.ops.cpu.pack import pack_dense
from quire.ops.cpu.pack_sparse import SPARSE
from quire.ops.experts import ExpertActivation, Grouped, Routing
from quire.ops.layout import KVCache, KVLayout
from quire.ops.native import huge_bytes
from quire.ops.reference.caches import write
from quire.ops.weights import Packed, Weight

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from op_cases.weights import normal, random_weight
from over_torch import arrays

CACHES = {"f32": F32, "bf16": BF16, "fp16": F16, "int8": I8, "fp8": F8}
COLD_BYTES = 160 << 20
"""All copies of a dense matrix: more than the last-level cache of the machines in mind."""
SHARES = ("0", "0.2", "0.3", "0.4", "2:4", "0.5", "0.6", "0.75", "0.9")
HIDDEN, WIDTH, TOP_K = 2048, 768, 8
Way = Callable[[int], Any]
"""What is timed; it gets the number of the turn."""


def in_turns(ops: Ops, ways: dict[str, Way], rounds: int, calls: int = 1, warm: int = 1) -> dict[str, float]:
    """Median milliseconds of each way, one of `calls` calls that it makes, and `NAME x`: the median of the first way's
    time by its own in the same turn. `warm` turns are not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + warm):
        for name, way in ways.items():
            ops.begin_step()
            began = time.perf_counter()
            way(turn)
            if turn >= warm:
                times[name].append(1e3 * (time.perf_counter() - began) / calls)
    first, *others = times
    found = {name: round(statistics.median(values), 4) for name, values in times.items()}
    for name in others:
        ratios = (a / b for a, b in zip(times[first], times[name], strict=True))
        found[f"{name} x"] = round(statistics.median(ratios), 3)
    return found


# ----------------------------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Batch:
    """One row of each sequence over the caches of some layers."""

    caches: list[KVCache]
    tables: Host


Batches = Callable[[Ops, KVLayout, argparse.Namespace], dict[str, Batch]]


def filled(ops: Ops, layout: KVLayout, layers: int, blocks: int) -> list[KVCache]:
    """Caches of random keys and values."""
    caches, step = [ops.allocate_cache(layout, blocks) for _ in range(layers)], 4096 // layout.block_size
    for cache in caches:
        g = torch.Generator().manual_seed(0)
        for first in range(0, blocks, step):
            slots = torch.arange(first * layout.block_size, min(blocks, first + step) * layout.block_size)
            k, v = (torch.randn(len(slots), layout.kv_heads, layout.head_dim, generator=g) for _ in range(2))
            write(KVCache(layout, to_torch(cache.keys), to_torch(cache.values)), slots, k, v)
    return caches


def shared_batches(ops: Ops, layout: KVLayout, args: argparse.Namespace) -> dict[str, Batch]:
    """One copy of the leading blocks for all sequences, and one for each at other addresses."""
    size, n = layout.block_size, args.sequences
    lead, own = args.tokens // size, -(-args.own // size)
    once = np.concatenate((np.tile(np.arange(lead), (n, 1)), lead + np.arange(n * own).reshape(n, own)), 1).astype(I32)
    each = np.arange(n * (lead + own), dtype=np.int32).reshape(n, lead + own)
    caches = filled(ops, layout, args.layers, lead + n * own)
    copies = [ops.allocate_cache(layout, n * (lead + own)) for _ in caches]
    for source, target in zip(caches, copies, strict=True):
        target.keys[each] = source.keys[once]
        target.values[each] = source.values[once]
    return {"copies": Batch(copies, each), "shared": Batch(caches, once)}


def block_batches(ops: Ops, layout: KVLayout, args: argparse.Namespace) -> dict[str, Batch]:
    """The same numbers of tokens in blocks of each size; a sequence's lie one after the other, as a prompt's do."""
    made = {}
    for size in args.sizes:
        own, n = KVLayout(size, layout.kv_heads, layout.head_dim, layout.dtype), args.sequences
        blocks = -(-args.tokens // size)
        tables = np.arange(n * blocks, dtype=np.int32)
        if args.shuffled:
            tables = np.random.default_rng(0).permutation(tables)
        made[f"blocks of {size}"] = Batch(filled(ops, own, args.layers, n * blocks), tables.reshape(n, blocks))
    return made


def shared(ops: Ops, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Blocks that all sequences share beside copies of them."""
    return attention(ops, args, shared_batches, args.tokens + args.own)


def blocks(ops: Ops, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Blocks of each size."""
    return attention(ops, args, block_batches, args.tokens)


def attention(ops: Ops, args: argparse.Namespace, batches: Batches, tokens: int) -> Iterator[dict[str, Any]]:
    """A layer's milliseconds for each form of heads and format of keys and values."""
    for form in args.heads:
        heads, rest = form.split("/")
        kv_heads, d = map(int, rest.split("x"))
        for dtype in args.kv_dtype:
            layout = KVLayout(args.block_size, kv_heads, d, CACHES[dtype])
            found = attention_times(ops, batches(ops, layout, args), int(heads), tokens, args.rounds or 15)
            yield {"heads": form, "kv": dtype, "sequences": args.sequences, "tokens": tokens} | found


def attention_times(ops: Ops, made: dict[str, Batch], heads: int, tokens: int, rounds: int) -> dict[str, float]:
    """Times of each batch. `SystemExit` where their bits differ."""
    first = next(iter(made.values()))
    layout, n = first.caches[0].layout, len(first.tables)
    qkv = np.random.default_rng(1).standard_normal((n, (heads + 2 * layout.kv_heads) * layout.head_dim), np.float32)
    cu_q, context = np.arange(n + 1, dtype=np.int32), np.full(n, tokens, np.int32)
    spec = AttentionSpec(layout.head_dim**-0.5)

    def way(batch: Batch) -> Way:
        return lambda turn: [ops.attention(qkv, each, cu_q, context, batch.tables, spec) for each in batch.caches][-1]

    ways = {name: way(batch) for name, batch in made.items()}
    bits = []
    for call in ways.values():
        ops.begin_step()
        bits.append(call(0).copy())
    if not all(np.array_equal(bits[0], other) for other in bits):
        raise SystemExit(f"bits differ between {', '.join(ways)}")
    return in_turns(ops, ways, rounds, len(first.caches))


# ------------------------------------------------------------------------------------------------------------- experts


class Layer:
    """Experts of one weight kind: one packed buffer for the grouped op, one `Packed` each for the loop."""

    def __init__(self, ops: Ops, kind: str, experts: int) -> None:
        g = torch.Generator().manual_seed(0)
        self.ops, self.routing = ops, Routing(experts, TOP_K, renormalize=True)
        up = [arrays(random_weight(g, kind, 2 * WIDTH, HIDDEN, 128)) for _ in range(2)]
        down = [arrays(random_weight(g, kind, HIDDEN, WIDTH, 128)) for _ in range(2)]
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
        """As the decoder does."""
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


def experts(ops: Ops, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A layer's milliseconds; rows of each turn are others, so that weights come from memory."""
    memory = huge_bytes(768 << 20)
    memory.fill(0)
    for kind in args.kinds or ("int4", "int8", "bf16"):
        layer = Layer(ops, kind, args.experts)
        for rows in args.rows:
            g = np.random.default_rng(rows)
            sizes = ((rows, HIDDEN), (rows, args.experts))
            turns = [tuple(g.standard_normal(size, np.float32) for size in sizes) for _ in range(16)]
            ops.begin_step()
            got, want = layer.grouped(*turns[0]).copy(), layer.loop(*turns[0])
            assert float(np.abs(got - want).max() / np.abs(want).max()) < 1e-3, "both ways are the same layer"
            ways: dict[str, Way] = {
                name: lambda turn, way=way, turns=turns: way(*turns[turn % 16])  # type: ignore[misc]
                for name, way in (("loop", layer.loop), ("grouped", layer.grouped))
            }
            found = in_turns(ops, ways, args.rounds or 15)
            used = layer.expert_bytes * args.experts * (1 - (1 - TOP_K / args.experts) ** rows)
            rate, best = 1e3 * used / found["grouped"], statistics.median(read_rate(ops.native, memory) for _ in "123")
            yield (
                {"kind": kind, "rows": rows} | found | {"GB/s": round(rate / 1e9, 1), "of reads": round(rate / best, 3)}
            )


# -------------------------------------------------------------------------------------------------------------- sparse


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


def sparse(ops: Ops, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Both packings of one weight, in more copies than caches hold; bytes are those of a weight, with scales."""
    n, k = args.shape
    for kind in args.kinds or SPARSE:
        for zeros in args.zeros:
            weight = pruned(kind, n, k, args.group, zeros)
            copies = max(2, -(-COLD_BYTES // pack_dense(ops.cpu, weight).nbytes))
            made = {"dense": [pack_dense(ops.cpu, weight) for _ in range(copies)],
                    "sparse": [ops.pack(weight) for _ in range(copies)]}  # fmt: skip
            sizes = {f"{name}_bytes": round(packed[0].nbytes / (n * k), 3) for name, packed in made.items()}
            for rows in args.rows:
                x = normal(torch.Generator().manual_seed(rows), rows, k).numpy()
                ways = {name: product(ops, x, packed) for name, packed in made.items()}
                found = in_turns(ops, ways, ((args.rounds or 4) - 1) * copies, 1, copies)
                times = {"dense_ms": found["dense"], "sparse_ms": found["sparse"], "faster": found["sparse x"]}
                yield {"kind": kind, "zeros": zeros, "rows": rows} | times | sizes


def product(ops: Ops, x: Host, packed: list[Packed]) -> Way:
    """The product with the copy whose turn it is."""
    return lambda turn: ops.linear(x, packed[turn % len(packed)], None)


WORK = {"shared": shared, "blocks": blocks, "experts": experts, "sparse": sparse}


def main() -> None:
    """Measure and print a line of JSON for each row."""
    parser = parser_of(__doc__, WORK)
    parser.add_argument("--heads", nargs="+", default=["32/8x64", "16/8x128"], help="heads/kv heads x head size")
    parser.add_argument("--kv-dtype", nargs="+", default=["bf16"], choices=CACHES)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--own", type=int, default=64, help="tokens of each sequence behind the shared ones")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--shuffled", action="store_true", help="blocks in any order")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--kinds", nargs="+", help="kinds of weights; all that the part has unless named")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 512])
    parser.add_argument("--experts", type=int, default=128, help="of the layer (128 of bf16 take 1.2 GB twice)")
    parser.add_argument("--zeros", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--shape", nargs=2, type=int, default=[8192, 2048], metavar=("N", "K"), help="of sparse")
    parser.add_argument("--group", type=int, choices=(32, 64, 128), default=32)
    parser.add_argument("--rounds", type=int, default=0, help="turns; 0: 15, of sparse 4 over all copies")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--output", type=Path, help="file that gets all rows, as JSON")
    args = parser.parse_args()
    rows = []
    for what in args.what:
        more: dict[str, Any] = {"sparse": "on"} if what == "sparse" else {}
        ops = open_backend(DeviceConfig(device="cpu", isa=args.isa, threads=args.threads, **more))
        for row in WORK[what](ops, args):
            print(json.dumps(row), flush=True)
            rows.append(row)
    if args.output is not None:
        args.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
