"""The attention of a decode step on the CPU: with blocks that sequences share beside copies of them, and small blocks.

    python -m benchmarks.kernels.attention ...

    shared --heads 32/8x64 16/8x128 --kv-dtype bf16 int8 --sequences 16 --tokens 4096
    blocks --heads 32/8x64 --sequences 16 --tokens 1024 --sizes 16 1
    steps --shape llama-1b --quantization int4 --sequences 16 --tokens 1024 --sizes 16 1

`shared`: all sequences name the same blocks for `--tokens` tokens and have `--own` of their own; beside it every
sequence has copies of them at other addresses. The bits must be equal. `blocks`: the same batch in blocks of each size.
`steps`: whole decode steps of an engine for each size of a block. The settings take turns in one process, the first two
over `--layers` caches one after the other, as a step does, so that none finds its keys in the processor's caches.
Medians of a layer's (or step's) milliseconds, and how many times faster than the first each setting is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quire.bench.suite.foreign.shapes import SHAPES, write_config
from quire.core.config import DeviceConfig, flat_config
from quire.core.dtypes import BF16, F8, F16, F32, I8, I32
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.start import start_engine
from quire.ops.arrays import Host, to_torch
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops, open_backend
from quire.ops.layout import KVCache, KVLayout
from quire.ops.reference.caches import write

KINDS = {
    "f32": F32,
    "bf16": BF16,
    "fp16": F16,
    "int8": I8,
    "fp8": F8,
}


@dataclass(frozen=True)
class Setting:
    """A batch of one row per sequence over the caches of some layers."""

    name: str
    caches: list[KVCache]
    tables: Host


def fill(cache: KVCache, blocks: int) -> None:
    """Random keys and values in the first blocks of a cache."""
    g = torch.Generator().manual_seed(0)
    layout, heads, d = cache.layout, cache.layout.kv_heads, cache.layout.head_dim
    for first in range(0, blocks, 4096 // layout.block_size):
        last = min(blocks, first + 4096 // layout.block_size)
        slots = torch.arange(first * layout.block_size, last * layout.block_size)
        k, v = (torch.randn(len(slots), heads, d, generator=g) for _ in range(2))
        write(KVCache(layout, to_torch(cache.keys), to_torch(cache.values)), slots, k, v)


def caches_of(ops: Ops, layout: KVLayout, layers: int, blocks: int) -> list[KVCache]:
    """Caches of random numbers."""
    made = [ops.allocate_cache(layout, blocks) for _ in range(layers)]
    for cache in made:
        fill(cache, blocks)
    return made


def shared(ops: Ops, layout: KVLayout, args: argparse.Namespace) -> list[Setting]:
    """One copy of the leading blocks for all sequences, and one for each."""
    size, n = layout.block_size, args.sequences
    lead, own = args.tokens // size, -(-args.own // size)
    once = np.concatenate((np.tile(np.arange(lead), (n, 1)), lead + np.arange(n * own).reshape(n, own)), 1).astype(I32)
    each = np.arange(n * (lead + own), dtype=np.int32).reshape(n, lead + own)
    caches = caches_of(ops, layout, args.layers, lead + n * own)
    copies = [ops.allocate_cache(layout, n * (lead + own)) for _ in caches]
    for source, target in zip(caches, copies, strict=True):
        target.keys[each] = source.keys[once]
        target.values[each] = source.values[once]
    return [Setting("copies", copies, each), Setting("shared", caches, once)]


def sizes(ops: Ops, layout: KVLayout, args: argparse.Namespace) -> list[Setting]:
    """The same numbers of tokens in blocks of each size; a sequence's lie one after the other, as a prompt's do."""
    made = []
    for size in args.sizes:
        own, n = KVLayout(size, layout.kv_heads, layout.head_dim, layout.dtype), args.sequences
        blocks = -(-args.tokens // size)
        tables = np.arange(n * blocks, dtype=np.int32)
        if args.shuffled:
            tables = np.random.default_rng(0).permutation(tables)
        made.append(
            Setting(f"blocks of {size}", caches_of(ops, own, args.layers, n * blocks), tables.reshape(n, blocks))
        )
    return made


def measure(ops: Ops, settings: list[Setting], heads: int, tokens: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of a layer of each setting, taken in turn; all must give the same bits."""
    layout, n = settings[0].caches[0].layout, len(settings[0].tables)
    width = (heads + 2 * layout.kv_heads) * layout.head_dim
    qkv = np.random.default_rng(1).standard_normal((n, width), np.float32)
    cu_q, context = np.arange(n + 1, dtype=np.int32), np.full(n, tokens, np.int32)
    spec, bits = AttentionSpec(layout.head_dim**-0.5), {}
    times: dict[str, list[float]] = {setting.name: [] for setting in settings}
    for turn in range(rounds + 1):
        for setting in settings:
            ops.begin_step()
            started = time.perf_counter()
            for cache in setting.caches:
                out = ops.attention(qkv, cache, cu_q, context, setting.tables, spec)
            if turn:
                times[setting.name].append((time.perf_counter() - started) / len(setting.caches) * 1e3)
            bits[setting.name] = out.copy()
    first, *others = bits.values()
    if not all(np.array_equal(first, other) for other in others):
        raise SystemExit(f"bits differ between {', '.join(bits)}")
    return {name: statistics.median(t) for name, t in times.items()}


def steps(args: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of a decode step with blocks of each size, engines taking turns."""
    engines = {}
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_config(args.shape, Path(folder)))
        for size in args.sizes:
            blocks = args.sequences * -(-(args.tokens + args.rounds + 32) // size)
            options = {
                "block_size": size,
                "num_blocks": blocks,
                "max_num_seqs": args.sequences,
                "threads": args.threads,
            }
            engines[f"blocks of {size}"] = start_engine(
                flat_config(model=model, load_format="dummy", enable_prefix_caching=False,
                            quantization=args.quantization, max_model_len=args.tokens + args.rounds + 32, **options)
            )  # fmt: skip
    for engine in engines.values():
        for i in range(args.sequences):
            prompt = tuple((j * 7919 + i) % 31000 + 5 for j in range(args.tokens))
            params = SamplingParams(max_tokens=args.rounds + 16, temperature=0.0, ignore_eos=True)
            engine.submit(Request(id=str(i), prompt=prompt, params=params, seed=0, arrival=0.0))
        while sum(len(s.tokens) > s.prompt_len + 2 for s in engine.scheduler.running) < args.sequences:
            engine.step()
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(args.rounds):
        for name, engine in engines.items():
            started = time.perf_counter()
            engine.step()
            times[name].append((time.perf_counter() - started) * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def report(what: dict[str, object], found: dict[str, float]) -> None:
    """Print a line of milliseconds, and how many times faster than the first each is."""
    base, *_ = found.values()
    ratios = {f"{name} x": round(base / ms, 2) for name, ms in found.items()}
    print(json.dumps(what | {name: round(ms, 3) for name, ms in found.items()} | ratios), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("shared", "blocks", "steps"))
    parser.add_argument("--shape", default="llama-1b", choices=SHAPES)
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--heads", nargs="+", default=["32/8x64", "16/8x128"], help="heads/kv heads x head size")
    parser.add_argument("--kv-dtype", nargs="+", default=["bf16"], choices=KINDS)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--own", type=int, default=64, help="tokens of each sequence behind the shared ones")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--shuffled", action="store_true", help="blocks in any order")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    if args.what == "steps":
        report({"shape": args.shape, "sequences": args.sequences, "tokens": args.tokens}, steps(args))
        return
    ops = open_backend(DeviceConfig(device="cpu", threads=args.threads))
    for form in args.heads:
        heads, rest = form.split("/")
        kv_heads, d = map(int, rest.split("x"))
        for dtype in args.kv_dtype:
            layout = KVLayout(args.block_size, kv_heads, d, KINDS[dtype])
            made = (shared if args.what == "shared" else sizes)(ops, layout, args)
            tokens = args.tokens + (args.own if args.what == "shared" else 0)
            found = measure(ops, made, int(heads), tokens, args.rounds)
            report({"heads": form, "kv": dtype, "sequences": args.sequences, "tokens": tokens}, found)


if __name__ == "__main__":
    main()
