"""Serving that is shared: tenants that share an engine, long prompts among answers, a machine with other work.

    python -m benchmarks.serving.shared ...

    fairness  a quiet tenant alone and beside a flood: fair, and first come, first served
    shares    two floods, weights 3 and 1: tokens that each was served
    itl       gaps between tokens beside prompts of 4,000: chunks by time, and of 512
    machine   a server while nothing else runs, and while another process keeps one core busy

The first three run an engine in this process; requests come when they are due (Poisson), whatever was answered.
`machine` starts a server. For each state: time per token of one stream and of eight together, time to the first token,
and what a request that needs no model (/v1/models) takes while they are answered: that of the event loop beside busy
kernels. First of all and last, the processor time that the server takes while nobody asks anything: its threads spin
for microseconds after a step and then sleep, so it must be close to none.
Random weights of a real shape, in int8, of `machine` in int4, unless told. Results: results/tenants.json,
results/shared.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.results import keep, measure, parser_of
from quire.bench import serving
from quire.bench.http import Client
from quire.bench.loads import ServeLoad
from quire.bench.records import Record
from quire.bench.suite.foreign.shapes import SHAPES, write_config
from quire.bench.suite.servers import StartedServer, server
from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.start import start_engine

# ------------------------------------------------------------------------------------------------------------- tenants


@dataclass(frozen=True)
class Load:
    """What one tenant sends: requests a second, tokens of a prompt and of an answer."""

    tenant: str
    rate: float
    prompt: int
    output: int
    weight: float = 1.0

    def requests(self, seconds: float, vocab_size: int, seed: int) -> Iterator[Request]:
        """Those of so many seconds; `arrival` counts from 0."""
        rng, due = random.Random(f"{self.tenant} {seed}"), 0.0
        asked = SamplingParams(max_tokens=self.output, ignore_eos=True, temperature=0.0)
        while (due := due + rng.expovariate(self.rate)) < seconds:
            prompt = tuple(rng.randrange(16, vocab_size) for _ in range(self.prompt))
            name = f"{self.tenant} {due:.6f}"
            yield Request(
                id=name, prompt=prompt, params=asked, seed=0, arrival=due, tenant=self.tenant, weight=self.weight
            )


def serve(engine: Engine, loads: list[Load], seconds: float, stop: float | None = None) -> dict[str, Record]:
    """Submit each when it is due and step until all are done, or for `stop` seconds; times count from the start."""
    vocab = engine.model.spec.vocab_size
    due = sorted((r for load in loads for r in load.requests(seconds, vocab, 0)), key=lambda r: -r.arrival)
    records = {r.id: Record(intended=r.arrival, sent=r.arrival, input_tokens=len(r.prompt)) for r in due}
    start = time.perf_counter()
    while (due or engine.has_work) and (stop is None or time.perf_counter() - start < stop):
        while due and due[-1].arrival <= time.perf_counter() - start:
            engine.submit(due.pop())
        if not engine.has_work:
            time.sleep(max(0.0, due[-1].arrival - (time.perf_counter() - start)))
            continue
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            assert output.error is None, output.error
            if output.tokens:
                records[output.request_id].chunks.append(now)
                records[output.request_id].output_tokens += len(output.tokens)
    for name in records:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    return records


def of(records: dict[str, Record], tenant: str) -> list[Record]:
    """One tenant's."""
    return [record for name, record in records.items() if name.split()[0] == tenant]


def ms(values: list[float]) -> dict[str, float]:
    """Median and p99 in milliseconds."""
    return {"p50_ms": 1e3 * float(np.percentile(values, 50)), "p99_ms": 1e3 * float(np.percentile(values, 99))}


def throughput(records: dict[str, Record], since: float, until: float) -> float:
    """Tokens of prompts and answers a second; a prompt counts when its first token comes."""
    tokens = 0
    for record in records.values():
        tokens += sum(since <= at < until for at in record.chunks)
        tokens += record.input_tokens * bool(record.chunks and since <= record.chunks[0] < until)
    return tokens / (until - since)


def engine_of(args: argparse.Namespace, **options: Any) -> Engine:
    """An engine of the asked shape at the asked bits."""
    own = {"load_format": "dummy", "quantization": args.quantization or "int8"}
    return start_engine(
        flat_config(model=str(write_config(args.shape, args.work.absolute() / args.shape)), **(own | options))
    )


def fairness(args: argparse.Namespace) -> dict[str, Any]:
    """TTFT of the quiet tenant and what all were served, in the same seconds of the same arrivals."""
    quiet = Load("quiet", args.rate, 256, 32)
    flood = Load("flood", 10 * args.rate, 256, 32)
    found: dict[str, Any] = {}
    for policy in ("fair", "fcfs"):
        options = {"max_num_batched_tokens": args.chunk, "max_num_seqs": 16, "scheduling_policy": policy}
        engine = engine_of(args, max_model_len=1024, **options)
        serve(engine, [quiet, flood], 3.0)
        if policy == "fair":
            found["alone"] = ms([r.ttft for r in serve(engine, [quiet], args.seconds).values()])
        records = serve(engine, [quiet, flood], args.seconds, stop=args.seconds)
        served = [r.ttft for r in of(records, "quiet") if r.chunks]
        found[policy] = ms(served) | {
            "tokens_per_s": throughput(records, 5.0, args.seconds), "answered": len(served),
            "asked": len(of(records, "quiet")),
        }  # fmt: skip
    found["ttft_p99_beside_alone"] = found["fair"]["p99_ms"] / found["alone"]["p99_ms"]
    found["throughput_beside_fcfs"] = found["fair"]["tokens_per_s"] / found["fcfs"]["tokens_per_s"]
    return found


def shares(args: argparse.Namespace) -> dict[str, Any]:
    """Two tenants that always wait: what each was served, a generated token counted twice as the policy counts it."""
    loads = [Load("three", 10 * args.rate, 256, 32, 3.0), Load("one", 10 * args.rate, 256, 32, 1.0)]
    engine = engine_of(args, max_num_batched_tokens=args.chunk, max_num_seqs=16, scheduling_policy="fair")
    records = serve(engine, loads, args.seconds, stop=args.seconds)
    served: Counter[str] = Counter()
    for name, record in records.items():
        late = [at for at in record.chunks if at >= 5.0]
        served[name.split()[0]] += 2 * len(late) + record.input_tokens * bool(late and late[0] == record.chunks[0])
    share = served["three"] / served.total()
    return {"served": dict(served), "share_of_three": share, "beside_its_weight": share / 0.75}


def itl(args: argparse.Namespace) -> dict[str, Any]:
    """Some eight answers are under way at any time while long prompts come: gaps between the tokens of the answers."""
    answers, prompts = Load("answers", 0.5, 64, 400), Load("prompts", args.rate, 4000, 8)
    ways = {"timed": {"target_itl_ms": 50.0}, "chunks of 512": {"max_num_batched_tokens": 512}}
    found: dict[str, Any] = {}
    for name, way in ways.items():
        engine = engine_of(args, max_model_len=4096, max_num_seqs=16, **way)
        serve(engine, [answers, prompts], 3.0, stop=15.0)
        records = serve(engine, [answers, prompts], args.seconds, stop=args.seconds)
        gaps = [gap for record in of(records, "answers") for gap in record.gaps]
        found[name] = ms(gaps) | {
            "gaps": len(gaps), "tokens_per_s": throughput(records, 0.0, args.seconds),
            "prompts_done": sum(bool(r.chunks) for r in of(records, "prompts")),
        }  # fmt: skip
    found["throughput_beside_chunks"] = found["timed"]["tokens_per_s"] / found["chunks of 512"]["tokens_per_s"]
    return found


# ------------------------------------------------------------------------------------------------------------- machine

STREAMS = (1, 8)
PROBE_GAP = 0.02


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process that never sleeps."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
        yield
    finally:
        process.kill()
        process.wait()


def idle_share(found: StartedServer, seconds: float) -> float:
    """Cores that the server keeps busy while nobody asks anything."""
    time.sleep(1.0)
    before = found.cpu_seconds()
    time.sleep(seconds)
    return (found.cpu_seconds() - before) / seconds


async def streams(args: argparse.Namespace, url: str, count: int) -> tuple[dict[str, Any], list[float]]:
    """`count` requests at once: what `quire bench serve` reports, and seconds of light requests beside them."""
    load = ServeLoad(
        base_url=url,
        num_prompts=count,
        input_len=str(args.input_len),
        output_len=str(args.output_len),
        vocab_size=SHAPES[args.shape]["vocab_size"],
    )
    client, light = Client(url), list[float]()

    async def probe() -> None:
        while True:
            started = time.perf_counter()
            await client.get("/v1/models")
            light.append(time.perf_counter() - started)
            await asyncio.sleep(PROBE_GAP)

    probing = asyncio.create_task(probe())
    try:
        found = await serving.run(load)
    finally:
        probing.cancel()
    return found, light


def figures(args: argparse.Namespace, url: str) -> dict[str, float]:
    """One state of the machine. `SystemExit` when a request failed."""
    row: dict[str, float] = {}
    for count in STREAMS:
        found, light = asyncio.run(streams(args, url, count))
        if found["rates"]["failed"]:
            raise SystemExit(f"requests failed: {found['errors']}")
        row[f"x{count} tokens/s"] = found["rates"]["output_tokens_per_s"]
        row[f"x{count} tpot p50 ms"] = found["latency_ms"]["tpot"]["p50"]
        row[f"x{count} ttft p50 ms"] = found["latency_ms"]["ttft"]["p50"]
        row[f"x{count} light p50 ms"] = 1e3 * statistics.median(light)
        row[f"x{count} light p99 ms"] = 1e3 * sorted(light)[int(0.99 * (len(light) - 1))]
    return row


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Quiet and shared in turn: medians, and cores that the idle server keeps busy."""
    folder = write_config(args.shape, args.work.absolute() / args.shape)
    words = [
        sys.executable, "-m", "quire", "serve", str(folder), "--load-format", "dummy", "--max-model-len", "1024",
        "--threads", str(args.threads), "--quantization", args.quantization or "int4",
    ]  # fmt: skip
    rounds: dict[str, list[dict[str, float]]] = {"quiet": [], "shared": []}
    with server(words, {}, args.work / "quire-server.log") as found:
        idle = [idle_share(found, args.idle_seconds)]
        for _ in range(args.rounds):
            rounds["quiet"].append(figures(args, found.url))
            with busy_core():
                rounds["shared"].append(figures(args, found.url))
        idle.append(idle_share(found, args.idle_seconds))
    medians = {
        state: {name: statistics.median(r[name] for r in rows) for name in rows[0]} for state, rows in rounds.items()
    }
    names = ("shape", "quantization", "input_len", "output_len", "rounds", "threads")
    return {"load": {name: getattr(args, name) for name in names}, "idle_cores": idle, "medians": medians}


WORK = {"fairness": fairness, "shares": shares, "itl": itl}


def main() -> None:
    """Run some of them, print and keep what they found."""
    parser = parser_of(__doc__, WORK | {"machine": machine})
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--quantization", default="")
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    parser.add_argument("--seconds", type=float, default=60.0, help="that tenants send requests")
    parser.add_argument("--rate", type=float, default=0.4, help="requests a second of the quiet one, or long prompts")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=64, help="of machine")
    parser.add_argument("--output-len", type=int, default=64, help="of machine")
    parser.add_argument("--rounds", type=int, default=3, help="of machine")
    parser.add_argument("--idle-seconds", type=float, default=5.0, help="how long the idle server is watched")
    parser.add_argument("--threads", type=int, default=0, help="of machine")
    args = parser.parse_args()
    if "machine" in args.what:
        args.what.remove("machine")
        found = machine(args)
        print(json.dumps(found, indent=1))
        keep("shared", found)
    measure(WORK, args, "tenants")


if __name__ == "__main__":
    main()
