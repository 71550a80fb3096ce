"""Engines of several processes: the time of an exchange between ranks, the balance of experts, the cost of supervision.

    python -m benchmarks.engine.processes ...

    exchange                    microseconds of a sum over two ranks, rows of 2,048 numbers, beside gloo's
    balance --shape olmoe-like  ranks' pairs of a token and an expert with favourite tokens, before and after counts
    cost                        tokens a second of an engine process, supervised and not, while no engine dies

Random weights of a real shape. `cost`: two processes of the same shape take turns; requests come through the same
edge as a server's. Results: results/ranks.json, results/supervision.json. What ranks gain and cost as a whole measures
`quire bench suite benchmarks/suites/ranks.toml`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.results import measure, parser_of
from quire.bench.suite.foreign.shapes import SHAPES, write_config
from quire.core.config import DeviceConfig, EngineConfig, flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import EngineClient
from quire.engine.engine import Engine
from quire.engine.frontend.async_engine import AsyncEngine
from quire.engine.processes.process import ProcessEngine
from quire.engine.processes.supervisor import RestartPolicy, SupervisedEngine
from quire.engine.start import start_engine
from quire.ops.backend import open_backend
from quire.parallel.rendezvous_store import RemoteStore, serve
from quire.parallel.shared import SharedComm, comm_bytes, shared_memory
from quire.parallel.torch_distributed import ArrayComm, DistributedComm, gloo_group
from quire.parallel.wire import listen

TIMES = 200


def timed(work: Callable[[], object], calls: int = 1) -> dict[str, float]:
    """Microseconds of one of the calls that `work` makes."""
    spent = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        work()
        spent.append(1e6 * (time.perf_counter() - begin) / calls)
    return {"median_us": statistics.median(spent), "least_us": min(spent)}


def exchange(args: argparse.Namespace) -> dict[str, Any]:
    """Of a call out of a recording, and of one over gloo; the other rank is a fork of this process, each has a core."""
    file, listener, secret = shared_memory(comm_bytes(2)), listen("127.0.0.1", 0), os.urandom(32)
    other = os.fork()
    rank = int(other == 0)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    ops, found = open_backend(DeviceConfig(device="cpu", threads=1)), {}
    comm = SharedComm(file, rank, 2)
    store = RemoteStore(*listener.getsockname(), secret, 1, 2) if rank else serve(listener, secret, 2)
    gloo = ArrayComm(DistributedComm(gloo_group(store, "exchange", rank, 2, "127.0.0.1")))
    for rows in (1, 16, 64, 512):
        ops.begin_step()
        x = np.zeros((rows, 2048), np.float32)
        recorded = ops.record(lambda x=x: [comm.all_reduce(ops, x) for _ in range(20)])  # type: ignore[misc]
        found[f"{rows} rows"] = timed(recorded.run, 20)
        found[f"{rows} rows, gloo"] = timed(lambda x=x: gloo.all_reduce(ops, x))  # type: ignore[misc]
    if rank:
        os._exit(0)
    os.waitpid(other, 0)
    return found


def favourites(shape: str, turn: int) -> list[Request]:
    """Prompts of tokens of which the i-th is asked for 1 / i as often as the first (Zipf's law)."""
    rng, size = random.Random(turn), SHAPES[shape]["vocab_size"] - 16
    weights = list(accumulate(1 / (i + 1) for i in range(size)))
    params = SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.0)
    return [
        Request(
            id=f"{turn} {i}", prompt=tuple(rng.choices(range(16, size + 16), cum_weights=weights, k=64)), params=params,
            seed=0, arrival=0.0,
        )
        for i in range(16)
    ]  # fmt: skip


def rates(engine: Engine, requests: list[Request]) -> tuple[float, float]:
    """Tokens a second of the prompts, and of the answers past their first tokens."""
    began = time.perf_counter()
    for request in requests:
        engine.submit(request)
    firsts, made, first_at = set[str](), 0, began
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            made += len(output.tokens)
            firsts.add(output.request_id)
            if len(firsts) < len(requests) or first_at == began:
                made, first_at = 0, time.perf_counter()
    prompts = sum(len(request.prompt) for request in requests)
    return prompts / (first_at - began), made / (time.perf_counter() - first_at)


def balance(args: argparse.Namespace) -> dict[str, Any]:
    """Whole experts on each rank: placed as they lie, by the counts of that, and with copies."""
    found: dict[str, Any] = {}
    file = args.work.absolute() / "expert_load.json"
    file.unlink(missing_ok=True)
    own = options_of(args) | {"tensor_parallel_size": 2, "enable_expert_parallel": True, "expert_load_file": str(file)}
    own |= {"max_model_len": 1024, "device": "cpu", "threads": 1}
    for name, copies in (("as they lie", 0), ("by counts", 0), (f"{args.copies} copies", args.copies)):
        with closing(start_engine(flat_config(**own, num_redundant_experts=copies))) as engine:
            turns = [rates(engine, favourites(args.shape, turn)) for turn in range(args.rounds)]
            stats = engine.stats()
            prefill, decode = (statistics.median(phase) for phase in zip(*turns, strict=True))
            found[name] = {"most over mean": stats.expert_imbalance, "pairs": stats.expert_pairs,
                           "weight bytes": engine.model.weight_bytes, "prefill": prefill, "decode": decode}  # fmt: skip
    return found


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Of every engine: random weights of the shape."""
    folder = write_config(args.shape, args.work.absolute() / args.shape)
    return {"model": str(folder), "load_format": "dummy", "quantization": args.quantization}


def clients(config: EngineConfig) -> dict[str, EngineClient]:
    """An engine of each kind."""
    kept = SupervisedEngine(lambda *_: ProcessEngine(config), RestartPolicy(), config.scheduler)
    return {"supervised": kept, "alone": ProcessEngine(config)}


async def served(args: argparse.Namespace, config: EngineConfig) -> dict[str, list[float]]:
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
    options = options_of(args) | {"kv_cache_memory_bytes": 1 << 30, "max_model_len": 2048}
    found = asyncio.run(served(args, flat_config(**options)))
    ratios = [kept / alone for kept, alone in zip(found["supervised"], found["alone"], strict=True)]
    return {"ratio": statistics.median(ratios), "ratios": ratios, "tokens_per_s": found, "batch": args.batch}


WORK = {"exchange": exchange, "balance": balance, "cost": cost}


def main() -> None:
    """Run some of them, print and keep what they found."""
    parser = parser_of(__doc__, WORK)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--copies", type=int, default=8, help="redundant experts of balance")
    parser.add_argument("--batch", type=int, default=16, help="requests of cost at a time")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    measure(WORK, parser.parse_args(), {"exchange": "ranks", "balance": "ranks", "cost": "supervision"})


if __name__ == "__main__":
    main()
