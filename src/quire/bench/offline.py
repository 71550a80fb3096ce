"""Latency of one batch, and throughput of many requests, in this process without a server."""

from __future__ import annotations

from typing import Any

from quire.bench.drive import drive
from quire.bench.loads import LatencyLoad, ThroughputLoad
from quire.bench.records import Record, latencies, phase_rates, rates
from quire.bench.workload import Length, random_items, requests_of
from quire.core.progress import counting_bar
from quire.engine.client import StepReport
from quire.engine.local import LocalEngine


def latency(engine: LocalEngine, load: LatencyLoad, seed: int) -> dict[str, Any]:
    """Run `load.iters` batches one after the other. Every batch has other prompts, so no prefix is found again."""
    inputs, outputs = Length.parse(load.input_len, "input-len"), Length.parse(load.output_len, "output-len")
    records: list[Record] = []
    seconds = 0.0
    with counting_bar(load.warmup + load.iters, "batches") as count:
        for turn in range(load.warmup + load.iters):
            items = random_items(
                load.batch_size, inputs, outputs, vocab_size=engine.info.vocab_size, seed=1000 * seed + turn
            )
            found, took = drive(engine, requests_of(items, engine.info, f"turn-{turn}"))
            if turn >= load.warmup:
                records += found
                seconds += took
            count()
    return {"rates": rates(records, seconds) | phase_rates(records), "latency_ms": latencies(records)}


class Waste:
    """The share of reserved KV slots that hold no token, step by step: measured, and for contiguous reservation.

    Contiguous baselines hold the same tokens at the same steps but reserve each sequence's row at once: for
    `max_model_len` tokens, or (knowing the answer's limit beforehand) for prompt + max_tokens.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._seen: dict[str, list[float]] = {"paged": [], "contiguous_request": [], "contiguous_max_model_len": []}

    def __call__(self, report: StepReport) -> None:
        """Look at the engine after a step."""
        running = self._engine.engine.scheduler.running
        held = sum(s.computed for s in running)
        if not held:
            return
        exact = sum(s.prompt_len + (s.request.params.max_tokens or 0) for s in running)
        longest = len(running) * self._engine.info.max_model_len
        self._seen["paged"].append(report.stats.waste)
        self._seen["contiguous_request"].append(1 - held / exact)
        self._seen["contiguous_max_model_len"].append(1 - held / longest)

    def summary(self) -> dict[str, dict[str, float]]:
        """Mean and maximum over steps of each kind."""
        return {k: {"mean": sum(v) / len(v), "max": max(v)} for k, v in self._seen.items() if v}


def throughput(engine: LocalEngine, load: ThroughputLoad, seed: int) -> dict[str, Any]:
    """Run all requests of `load` as fast as the engine can."""
    inputs, outputs = Length.parse(load.input_len, "input-len"), Length.parse(load.output_len, "output-len")
    items = random_items(
        load.num_prompts,
        inputs,
        outputs,
        vocab_size=engine.info.vocab_size,
        seed=seed,
        shared_prefix=load.shared_prefix,
    )
    waste = Waste(engine)
    with counting_bar(load.num_prompts, "requests") as count:

        def on_step(report: StepReport) -> None:
            waste(report)
            for output in report.outputs:
                if output.finish_reason is not None:
                    count()

        records, seconds = drive(engine, requests_of(items, engine.info, "request"), on_step)
    stats = engine.engine.stats()
    hits = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
    return {
        "rates": rates(records, seconds),
        "latency_ms": latencies(records),
        "kv_waste": waste.summary(),
        "engine": {"steps": stats.steps, "preemptions": stats.preemptions, "prefix_hit_share": hits},
    }
