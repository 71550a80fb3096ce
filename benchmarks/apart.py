"""Prompts computed by one replica and gone on with by another, beside two replicas that do both.

    python benchmarks/apart.py apart    gaps between tokens of answers, and times to first tokens, while prompts come

Two engines of one thread each, of a real shape with random weights; the blocks go through memory (`/dev/shm`).
Requests come when they are due (Poisson), the same ones in each way; ways take turns, and medians are of rounds.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from figures import measure, parser_of
from shapes import SHAPES, write_checkpoint
from tenants import Load, ms, of, throughput

from quire.bench.records import Record
from quire.core.config import EngineConfig, flat_config
from quire.engine.hosts.placing import Placing
from quire.engine.processes.replicas import ReplicatedEngine
from quire.engine.processes.supervisor import RestartPolicy, SupervisedEngine

WAYS: dict[str, dict[str, Any]] = {"both": {}, "apart": {"prefill_replicas": 1}}


def client_of(config: EngineConfig, start: Any) -> ReplicatedEngine:
    """As `quire serve` makes it."""
    parallel = config.parallel
    return ReplicatedEngine(
        parallel.data_parallel_size,
        lambda i, died: SupervisedEngine(partial(start, i), RestartPolicy(), config.scheduler, died),
        parallel.prefill_replicas,
    )


def serve(client: ReplicatedEngine, loads: list[Load], seconds: float, vocab: int, seed: int) -> dict[str, Record]:
    """Submit each when it is due, until all are done; times count from the start."""
    due = sorted((r for load in loads for r in load.requests(seconds, vocab, seed)), key=lambda r: -r.arrival)
    records = {r.id: Record(intended=r.arrival, sent=r.arrival, input_tokens=len(r.prompt)) for r in due}
    start, left = time.perf_counter(), set(records)
    while left:
        while due and due[-1].arrival <= time.perf_counter() - start:
            client.submit(due.pop())
        report = client.poll(0.002)
        now = time.perf_counter() - start
        for output in report.outputs if report else ():
            assert output.error is None, output.error
            if output.tokens:
                records[output.request_id].chunks.append(now)
                records[output.request_id].output_tokens += len(output.tokens)
            if output.finish_reason is not None:
                left.discard(output.request_id)
    return records


def apart(args: argparse.Namespace) -> dict[str, Any]:
    """Each way in turn, `rounds` times."""
    folder = args.work.absolute() / f"{args.shape}-weights"
    if not (folder / "config.json").exists():
        write_checkpoint(args.shape, folder)
    answers, prompts = Load("answers", args.answers, 64, 200), Load("prompts", args.rate, args.prompt, 8)
    found: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    for number in range(args.rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            shutil.rmtree(args.store, ignore_errors=True)
            options = {"quantization": args.quantization, "max_model_len": 4096, "kv_cache_memory_bytes": 1 << 30}
            options |= {"data_parallel_size": 2, "threads": 1, "kv_store": str(args.store), "kv_store_gb": 4.0}
            config = flat_config(model=str(folder), **options, **WAYS[way])
            with closing(Placing(config)) as placing, closing(client_of(config, placing.start)) as client:
                vocab = SHAPES[args.shape]["vocab_size"]
                serve(client, [answers, prompts], 3.0, vocab, 1000 + number)
                records = serve(client, [answers, prompts], args.seconds, vocab, number)
            gaps = [gap for record in of(records, "answers") for gap in record.gaps]
            row = {f"gap_{name}": value for name, value in ms(gaps).items()}
            for tenant in ("answers", "prompts"):
                row |= {f"{tenant}_ttft_{name}": v for name, v in ms([r.ttft for r in of(records, tenant)]).items()}
            row["tokens_per_s"] = throughput(records, 0.0, args.seconds)
            for name, value in row.items():
                found[way].setdefault(name, []).append(value)
    medians = {way: {name: statistics.median(each) for name, each in rows.items()} for way, rows in found.items()}
    return {"medians": medians, "rounds": found}


WORK = {"apart": apart}


def main() -> None:
    """Measure, print and keep what was found."""
    parser = parser_of(__doc__, WORK)
    parser.add_argument("--shape", choices=SHAPES, default="qwen-0.6b")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--answers", type=float, default=0.4, help="requests a second of 64 tokens, answered by 200")
    parser.add_argument("--rate", type=float, default=0.15, help="long prompts a second")
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--store", type=Path, default=Path("/dev/shm/quire-apart"))
    args = parser.parse_args()
    try:
        measure(WORK, args, "apart")
    finally:
        shutil.rmtree(args.store, ignore_errors=True)


if __name__ == "__main__":
    main()
