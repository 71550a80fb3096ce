"""The store behind the KV cache (`--kv-store`): what a restart keeps, and the time to a first token it saves.

    python -m benchmarks.memory.kv_store ...

    restart  share of prompts' tokens found at the first start's end and at the second's
    ttft     a prefix of 4,000 tokens that is read, beside one that is computed

Each round of `ttft` is a start of its own: it computes the prefix that the next one reads, in turns before and after.
In every second round the files were taken out of the system's page cache before ("cold"). Weights are random.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.common.results import measure, parser_of
from quire.bench.suite.foreign.shapes import SHAPES, write_checkpoint
from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.start import start_engine


def engine_of(args: argparse.Namespace) -> Engine:
    """A start with the store."""
    folder = args.work.absolute() / f"{args.shape}-weights"
    if not (folder / "config.json").exists():
        write_checkpoint(args.shape, folder)
    options = {"quantization": args.quantization, "kv_cache_memory_bytes": 2 << 30, "max_model_len": 4096}
    return start_engine(flat_config(model=str(folder), kv_store=str(args.store), kv_store_gb=4.0, **options))


def prompt_of(args: argparse.Namespace, name: str, tokens: int) -> tuple[int, ...]:
    """So many random tokens, the same for the same name."""
    rng = random.Random(name)
    return tuple(rng.randrange(16, SHAPES[args.shape]["vocab_size"]) for _ in range(tokens))


def first_token(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Seconds to the first token of a request that runs alone, and how many tokens of it were found."""
    asked = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    begin, seconds, found = time.perf_counter(), 0.0, 0
    engine.submit(Request(id=f"r{begin}", prompt=prompt, params=asked, seed=0, arrival=begin))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            seconds = seconds or time.perf_counter() - begin
            found = output.cached_tokens
    return seconds, found


def out_of_page_cache(folder: Path) -> None:
    """Have the system read the files from the disk the next time."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def ttft(args: argparse.Namespace) -> dict[str, Any]:
    """Both ways in every start but the first, which has nothing to read."""
    tail, found = prompt_of(args, "tail", 32), dict[str, list[float]]()
    for start in range(args.rounds + 1):
        ways = {"computed": f"prefix {start}", "stored": f"prefix {start - 1}"}
        names = [name for name in ways if start or name == "computed"]
        cold = start % 2 == 0
        if cold and start:
            out_of_page_cache(args.store)
        engine = engine_of(args)
        first_token(engine, prompt_of(args, f"warm up {start}", 64))
        for name in names if start % 4 < 2 else reversed(names):
            seconds, cached = first_token(engine, prompt_of(args, ways[name], args.prefix) + tail)
            assert (cached >= args.prefix // 16 * 16) == (name == "stored"), (name, cached)
            if start:
                key = name if name == "computed" else f"stored {'cold' if cold else 'warm'}"
                found.setdefault(key, []).append(seconds)
        engine.close()
    medians = {name: statistics.median(values) for name, values in found.items()}
    times = {name: medians["computed"] / value for name, value in medians.items() if name != "computed"}
    return {"prefix": args.prefix, "seconds": found, "median_s": medians, "times_faster": times}


def restart(args: argparse.Namespace) -> dict[str, Any]:
    """Prompts that share beginnings, twice; then once after a restart."""
    stems = [prompt_of(args, f"stem {i}", 384) for i in range(4)]
    prompts = [stems[i % 4] + prompt_of(args, f"own {i}", 64) for i in range(16)]
    rates = []
    for turns in (2, 1):
        engine = engine_of(args)
        for _ in range(turns):
            shares = [first_token(engine, prompt)[1] / len(prompt) for prompt in prompts]
            rates.append(statistics.mean(shares))
        engine.close()
    return {"first_start": rates[0], "its_end": rates[1], "second_start": rates[2]}


WORK = {"restart": restart, "ttft": ttft}


def main() -> None:
    """Run some of them, print and keep what they found."""
    parser = parser_of(__doc__, WORK)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    parser.add_argument("--prefix", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    args.store = args.work.absolute() / "kv-store"
    shutil.rmtree(args.store, ignore_errors=True)
    try:
        measure(WORK, args, "kv_store")
    finally:
        shutil.rmtree(args.store, ignore_errors=True)


if __name__ == "__main__":
    main()
