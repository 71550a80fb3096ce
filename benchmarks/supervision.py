"""What it costs that a request survives its engine's death, while no engine dies.

    python benchmarks/supervision.py cost    tokens a second of an engine process, supervised and not

Two processes of the same shape with random weights take turns; requests come through the same edge as a server's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from figures import measure, parser_of
from shapes import SHAPES, write_config

from quire.core.config import EngineConfig, flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import EngineClient
from quire.engine.frontend.async_engine import AsyncEngine
from quire.engine.processes.process import ProcessEngine
from quire.engine.processes.supervisor import RestartPolicy, SupervisedEngine


def clients(config: EngineConfig) -> dict[str, EngineClient]:
    """An engine of each kind."""
    kept = SupervisedEngine(lambda *_: ProcessEngine(config), RestartPolicy(), config.scheduler)
    return {"supervised": kept, "alone": ProcessEngine(config)}


async def rates(args: argparse.Namespace, config: EngineConfig) -> dict[str, list[float]]:
    """Tokens a second of each way, in turns."""
    found: dict[str, list[float]] = {}
    made = clients(config)
    edges = {way: AsyncEngine(client) for way, client in made.items()}

    async def one(way: str, number: int, seed: int) -> int:
        params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
        prompt = tuple((seed * 7919 + number * 104729 + i * 31) % 1000 for i in range(args.prompt))
        request = Request(id=f"{seed} {number}", prompt=prompt, params=params, seed=0, arrival=time.monotonic())
        return sum([len(output.tokens) async for output in edges[way].generate(request)])

    try:
        for number in range(args.rounds + 1):
            for way in edges if number % 2 else [*edges][::-1]:
                began = time.perf_counter()
                made_tokens = sum(await asyncio.gather(*(one(way, i, number) for i in range(args.batch))))
                if number:  # the first round is to be warm
                    found.setdefault(way, []).append(made_tokens / (time.perf_counter() - began))
    finally:
        for edge in edges.values():
            with closing(edge):
                pass
    return found


def cost(args: argparse.Namespace) -> dict[str, Any]:
    """The share of the rate that is left."""
    folder = args.work.absolute() / args.shape
    write_config(args.shape, folder)
    options = {"load_format": "dummy", "quantization": args.quantization, "kv_cache_memory_bytes": 1 << 30}
    found = asyncio.run(rates(args, flat_config(model=str(folder), max_model_len=2048, **options)))
    ratios = [kept / alone for kept, alone in zip(found["supervised"], found["alone"], strict=True)]
    return {"ratio": statistics.median(ratios), "ratios": ratios, "tokens_per_s": found, "batch": args.batch}


WORK = {"cost": cost}


def main() -> None:
    """Measure, print and keep what was found."""
    parser = parser_of(__doc__, WORK)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    measure(WORK, parser.parse_args(), "supervision")


if __name__ == "__main__":
    main()
