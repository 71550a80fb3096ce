"""The simulator beside the server it pretends to be, and what a million requests take.

    python -m benchmarks.planning.simulator ...

    calibrate  step times and what the edge adds, by loads that are none of the traces
    serve      traces by a server: mixed lengths; bursts, shared prefixes; long prompts
    compare    the same by the simulator, p50 and p99 of TTFT and ITL, tokens a second
    steps      step times of the engine in its own processor seconds, on a busy machine
    engine     the traces by that engine and by the simulator
    scale      1,000,000 requests on 1,000 replicas: seconds and peak memory
    wide       100,000 requests on 10,000 replicas, of which some fail

The server is `quire serve` with a shape of random weights in int8 and one thread, so that the other core is left to its
edge and to the clients. Traces are files in Mooncake's layout, which `quire bench serve` and `quire simulate` read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.common.results import RESULTS, measure, parser_of
from quire.bench.http import Client
from quire.bench.suite.foreign.shapes import write_config
from quire.bench.suite.servers import StartedServer, server
from quire.simulate.step_times import StepTable

LAYERS = 6
ENGINE = ["--load-format", "dummy", "--quantization", "int8", "--max-model-len", "2048", "--max-num-seqs", "16",
          "--num-blocks", "1500"]  # fmt: skip
OPTIONS = {"max_model_len": 2048, "max_num_seqs": 16, "num_blocks": 1500}
KNOTS = (1, 4, 16, 64, 128, 256, 512)
SCALE = 0.25
"""Of Mooncake's blocks of 512 tokens: prefixes are shared in blocks of 128."""


def model(args: argparse.Namespace) -> Path:
    """qwen-0.6b's shape with fewer layers."""
    folder = write_config("qwen-0.6b", args.work.absolute() / "qwen-6-layers")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    return folder


@contextmanager
def served(args: argparse.Namespace) -> Iterator[StartedServer]:
    """The server, warm."""
    words = [sys.executable, "-m", "quire", "serve", str(model(args)), *ENGINE, "--threads", "1"]
    with server(words, {}, args.work / "simulator.log") as up:
        asyncio.run(gaps_of(up, 4, 64, 24))
        yield up


# ------------------------------------------------------------------------------------------------------- calibration


async def stream(client: Client, prompt: int, tokens: int, rng: random.Random) -> list[float]:
    """When it was sent, and when each token came."""
    body = {"prompt": [rng.randrange(16, 31_000) for _ in range(prompt)], "max_tokens": tokens, "temperature": 0,
            "model": client_model, "stream": True, "ignore_eos": True}  # fmt: skip
    times = [time.perf_counter()]
    async for event in client.events("/v1/completions", body):
        if event["choices"]:
            times.append(time.perf_counter())
    return times


client_model = ""


async def gaps_of(up: StartedServer, batch: int, prompt: int, tokens: int) -> float:
    """Median gap while `batch` streams decode at once."""
    global client_model
    client, rng = Client(up.url, None), random.Random(batch * 1000 + prompt)
    client_model = (await client.get("/v1/models"))["data"][0]["id"]
    found = await asyncio.gather(*(stream(client, prompt, tokens, rng) for _ in range(batch)))
    begin, end = max(times[1] for times in found), min(times[-1] for times in found)
    gaps = [b - a for times in found for a, b in pairwise(times[1:]) if a > begin and b <= end]
    return statistics.median(gaps)


PAUSE = 0.4
"""Seconds that nobody asks for anything before a prompt: traces do not keep the server busy, and a first token behind
a pause takes longer than one in a row of them.
"""


async def first_of(up: StartedServer, prompt: int, times: int) -> float:
    """Median time to the one token of a prompt, alone, behind a pause."""
    client, rng = Client(up.url, None), random.Random(prompt)
    found = []
    for _ in range(times):
        await asyncio.sleep(PAUSE)
        sent, came, *_ = await stream(client, prompt, 1, rng)
        found.append(came - sent)
    return statistics.median(found)


def hats(rows: int) -> list[float]:
    """How much of each knot's seconds a step of so many rows takes."""
    return [float(np.interp(rows, KNOTS, np.eye(len(KNOTS))[i])) for i in range(len(KNOTS))]


Step = tuple[int, int, int]
"""Rows, keys that are read, pairs of a row and a key."""


def fit(seen: list[tuple[int, list[Step], bool, float]]) -> tuple[StepTable, float, list[float]]:
    """Least absolute relative errors, by least squares weighted again and again; no time is negative.

    `seen`: sequences, steps, whether the edge is in it, seconds.
    """
    lines = []
    for sequences, steps, edge, seconds in seen:
        line = np.sum([hats(rows) for rows, _, _ in steps], axis=0).tolist()
        line += [sum(keys for _, keys, _ in steps), sum(pairs for _, _, pairs in steps), sequences * len(steps), edge]
        lines.append([each / seconds for each in line])
    matrix, weights = np.array(lines), np.ones(len(lines))
    size = np.maximum(np.linalg.norm(matrix, axis=0), 1e-12)
    for _ in range(20):
        free = np.full(matrix.shape[1], True)
        while True:
            found = np.zeros(len(free))
            scaled = (matrix / size)[:, free] * weights[:, None]
            found[free] = np.linalg.lstsq(scaled, weights, rcond=None)[0] / size[free]
            if (found >= 0).all():
                break
            free[int((found * size).argmin())] = False
        errors = matrix @ found - 1
        weights = 1 / np.sqrt(np.maximum(np.abs(errors), 0.01))
    points = tuple((knot, float(s)) for knot, s in zip(KNOTS, found, strict=False))
    per_key, per_pair, per_sequence, edge_seconds = (float(each) for each in found[len(KNOTS) :])
    table = StepTable(points=points, per_key=per_key, per_pair=per_pair, per_sequence=per_sequence)
    return table, edge_seconds, errors.tolist()


def calibrate(args: argparse.Namespace) -> dict[str, Any]:
    """Decodes of several batches and contexts, and prompts alone, over HTTP."""
    seen: list[tuple[int, list[Step], bool, float]] = []
    with served(args) as up:
        for batch in (1, 2, 3, 4, 6, 8, 12, 16):
            seconds = asyncio.run(gaps_of(up, batch, 12, 40))
            seen.append((batch, [(batch, batch * 33, batch * 33)], False, seconds))
        for batch, prompt in ((1, 1500), (2, 1500), (8, 600), (12, 300)):
            seconds = asyncio.run(gaps_of(up, batch, prompt, 24))
            keys = batch * (prompt + 12)
            seen.append((batch, [(batch, keys, keys)], False, seconds))
        for prompt in (4, 16, 24, 40, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1500):
            seconds = asyncio.run(first_of(up, prompt, 7 if prompt < 500 else 5))
            cuts = [*range(0, prompt, 512), prompt]
            steps = [(b - a, b, (b - a) * a + (b - a) * (b - a + 1) // 2) for a, b in pairwise(cuts)]
            seen.append((1, steps, True, seconds))
    table, edge, errors = fit(seen)
    args.table.write_bytes(msgspec.json.encode(table))
    return {
        "table": msgspec.to_builtins(table),
        "edge_ms": 1e3 * edge,
        "largest_error": max(map(abs, errors)),
        "median_error": statistics.median(map(abs, errors)),
        "seen_ms": [[s, steps, round(1e3 * seconds, 3)] for s, steps, _, seconds in seen],
    }


# ------------------------------------------------------------------------------------------------------------ traces


def mixed_trace(rng: random.Random, seconds: float) -> Iterator[dict[str, Any]]:
    """Poisson, prompts of 16 to 256 tokens, answers of 8 to 64."""
    at = 0.0
    while (at := at + rng.expovariate(2.4)) < seconds:
        yield {"timestamp": 1e3 * at, "input_length": 4 * rng.randint(16, 256), "output_length": 4 * rng.randint(8, 64)}


def bursty_trace(rng: random.Random, seconds: float) -> Iterator[dict[str, Any]]:
    """Bursts of 4 to 10 requests, every one behind one of five beginnings of 128 to 384 tokens."""
    own, at = 1000, 0.0
    while (at := at + rng.expovariate(1 / 3.0)) < seconds:
        for _ in range(rng.randint(4, 10)):
            which, own = rng.randrange(5), own + 1
            ids = [10 * which + i for i in range(1 + which % 3)]
            at += rng.expovariate(20.0)
            yield {"timestamp": 1e3 * at, "input_length": 512 * len(ids) + 4 * rng.randint(16, 100),
                   "output_length": 4 * rng.randint(8, 48), "hash_ids": [*ids, own]}  # fmt: skip


def long_trace(rng: random.Random, seconds: float) -> Iterator[dict[str, Any]]:
    """Short questions, and now and then a prompt of 600 to 1,600 tokens."""
    at = 0.0
    while (at := at + rng.expovariate(1.0)) < seconds:
        long = rng.random() < 0.25
        length = rng.randint(600, 1600) if long else rng.randint(16, 96)
        yield {"timestamp": 1e3 * at, "input_length": 4 * length, "output_length": 4 * rng.randint(16, 64)}


TRACES = {"mixed": mixed_trace, "bursty": bursty_trace, "long": long_trace}


def trace_of(name: str, args: argparse.Namespace) -> Path:
    """Its file."""
    path = args.work / f"{name}.jsonl"
    asked = TRACES[name](random.Random(name), args.seconds)
    path.write_text("".join(json.dumps(each) + "\n" for each in asked))
    return path


def serve(args: argparse.Namespace) -> dict[str, Any]:
    """The traces by the server; what its clients saw."""
    found = {}
    with served(args) as up:
        for name in args.traces:
            out = args.work / f"{name}-server.json"
            quire("bench", "serve", "--base-url", up.url, "--trace", str(trace_of(name, args)), "--vocab-size", "31000",
                  "--warmup", "4", "--length-scale", str(SCALE), "-o", str(out))  # fmt: skip
            found[name] = figures(json.loads(out.read_text())["results"]) | {"seconds": args.seconds}
    return kept("serve") | found


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """The same traces by the simulator, beside what the server was measured to give: simulator / server."""
    found, calibrated = {}, kept("calibrate")
    args.table.write_text(json.dumps(calibrated["table"]))
    for name, server_gave in kept("serve").items():
        args.seconds = server_gave.pop("seconds")
        path, out = trace_of(name, args), args.work / f"{name}-simulator.json"
        quire("simulate", str(path), "--model", str(model(args)), *ENGINE, "--step-times", str(args.table), "--edge-ms",
              str(calibrated["edge_ms"]), "--length-scale", str(SCALE), "-o", str(out))  # fmt: skip
        gave = figures(json.loads(out.read_text())["results"])
        found[name] = compared(server_gave, gave)
    return found


def steps(args: argparse.Namespace) -> dict[str, Any]:
    """Step times of the engine in its processor seconds (`simulated_engine.py`), by loads that no trace has."""
    from benchmarks.planning.simulated_engine import engine_of, other_load, walk

    runs = engine_of(model(args), **OPTIONS)
    seen: list[tuple[int, list[Step], float]] = []
    walk(runs, other_load(0, 5))
    for seed in (1, 2):
        walk(runs, other_load(seed, args.calibration), seen)
    table, _, errors = fit([(sequences, work, False, seconds) for sequences, work, seconds in seen])
    found = {"table": msgspec.to_builtins(table), "steps": len(seen)}
    return found | {"median_error": statistics.median(map(abs, errors))}


def engine(args: argparse.Namespace) -> dict[str, Any]:
    """The traces by the engine in its processor seconds, and by the simulator with the step times of `steps`."""
    from benchmarks.planning.simulated_engine import engine_of, other_load, walk
    from quire.simulate.requests import RequestStream
    from quire.simulate.simulate_options import SimulatedLoad

    folder, found = model(args), kept("engine")
    runs = engine_of(folder, **OPTIONS)
    walk(runs, other_load(0, 5))
    args.table.write_text(json.dumps(kept("steps")["table"]))
    for name in args.traces:
        path, out = trace_of(name, args), args.work / f"{name}-simulator.json"
        runs.reset_prefix_cache()
        gave = figures(walk(runs, RequestStream(SimulatedLoad(length_scale=SCALE), str(path))))
        quire("simulate", str(path), "--model", str(folder), *ENGINE, "--step-times", str(args.table),
              "--length-scale", str(SCALE), "-o", str(out))  # fmt: skip
        found[name] = compared(gave, figures(json.loads(out.read_text())["results"])) | {"seconds": args.seconds}
    return found


def compared(real: dict[str, float], simulated: dict[str, float]) -> dict[str, Any]:
    """Both, and simulator / real."""
    ratios = {key: round(simulated[key] / real[key], 3) for key in simulated if key != "requests"}
    within = sum(0.9 <= ratio <= 1.1 for ratio in ratios.values())
    return {"real": real, "simulator": simulated, "ratio": ratios, "within_10_percent": f"{within} of {len(ratios)}"}


def kept(part: str) -> dict[str, Any]:
    """What was found before."""
    path = RESULTS / "simulator.json"
    return dict(json.loads(path.read_text()).get(part, {})) if path.exists() else {}


def figures(results: dict[str, Any]) -> dict[str, float]:
    """What is compared."""
    latency = results["latency_ms"]
    found = {f"{name}_ms_{p}": latency[name][p] for name in ("ttft", "itl") for p in ("p50", "p99")}
    rates = results["rates"]
    return found | {"output_tokens_per_s": rates["output_tokens_per_s"], "requests": rates["completed"]}


def quire(*words: str) -> None:
    """A command, whose output is shown."""
    subprocess.run([sys.executable, "-m", "quire", *words], check=True)


# ------------------------------------------------------------------------------------------------------------- scale

STEP_TIMES = StepTable(points=((1, 0.008), (64, 0.01), (512, 0.05)), per_key=2e-8, per_sequence=1e-5)
"""Of a GPU of the middle class and a model of 8 B, roughly; made up."""


def walked(requests: int, replicas: int, cells: int, **design: Any) -> dict[str, Any]:
    """Run so many requests of 128 to 512 tokens and answers of 32 to 128; seconds, and memory of all processes."""
    from quire.core.config import SchedulerConfig
    from quire.simulate.parallel_cells import run_cells
    from quire.simulate.replica import Setup
    from quire.simulate.requests import RequestStream
    from quire.simulate.simulate_options import SimulatedLoad
    from quire.simulate.timeline import Design

    setup = Setup(SchedulerConfig(max_num_seqs=32), 2048, 16, 4096)
    load = SimulatedLoad(num_prompts=requests, input_len="128:512", output_len="32:128", request_rate=8.0 * replicas)
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    whole = Design(setup=setup, times=STEP_TIMES, replicas=replicas, **design)
    part = run_cells(whole, RequestStream(load), {}, cells, lambda: None)
    results = part.measures({}).results(part.last)
    own, others = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "requests": requests, "replicas": replicas, "cells": cells, "seconds": time.perf_counter() - wall,
        "cpu_seconds": sum(os.times()[:4]) - cpu, "peak_bytes": 1024 * (own + (others * cells if cells > 1 else 0)),
        "simulated_seconds": part.last, "steps": part.steps, "completed": results["rates"]["completed"],
        "output_tokens": results["rates"]["output_tokens"], "replicas_lost": part.deaths, "moved": part.moved,
        "ttft_ms": results["latency_ms"]["ttft"], "itl_ms": results["latency_ms"]["itl"],
    }  # fmt: skip


def scale(args: argparse.Namespace) -> dict[str, Any]:
    """A million requests on a thousand replicas."""
    return walked(args.requests, 1000, args.cells)


def wide(args: argparse.Namespace) -> dict[str, Any]:
    """Ten thousand replicas, which fail now and then."""
    return walked(args.requests // 10, 10_000, args.cells, mtbf=600.0, start=5.0)


WORK: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "calibrate": calibrate, "serve": serve, "compare": compare, "steps": steps, "engine": engine,
    "scale": scale, "wide": wide,
}  # fmt: skip


def main() -> None:
    """Run some of them, print and keep what they found."""
    parser = parser_of(__doc__, WORK)
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    parser.add_argument("--seconds", type=float, default=90.0, help="of a trace")
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--calibration", type=int, default=60, help="requests of each of two rounds, of engine")
    parser.add_argument("--cells", type=int, default=2, help="processes of scale and wide")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    args.table = args.work / "step_times.json"
    measure(WORK, args, "simulator")


if __name__ == "__main__":
    main()
