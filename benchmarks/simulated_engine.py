"""The real engine in a time that its own processor seconds make: traces last as long as it computes.

Beside the simulator on machines that are not idle: arrivals, scheduler, blocks, kernels and sampling are the engine's,
steps last as long as the process computed for them (one thread), and HTTP is left out.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from quire.bench.records import Record, latencies
from quire.core.config import flat_config
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.start import start_engine
from quire.simulate.requests import ANSWER, SimulatedRequest

Step = tuple[int, int, int]
"""Rows, keys that are read, pairs of a row and a key."""


def engine_of(folder: Path, **options: Any) -> Engine:
    """One thread of a model with random weights in int8."""
    own = {"load_format": "dummy", "quantization": "int8", "threads": 1, "cache_packed": "off"}
    return start_engine(flat_config(model=str(folder), **(own | options)))


def real(ask: SimulatedRequest, name: str, longest: int) -> Request:
    """The request with tokens of the vocabulary in place of contents: the same where contents are."""
    tokens: list[int] = []
    for content, count in ask.parts:
        tokens += np.random.default_rng([content]).integers(16, 31_000, count).tolist()
    return replace(ask.request(name, longest), prompt=tuple(tokens))


def walk(
    engine: Engine, asks: Iterable[SimulatedRequest], seen: list[tuple[int, list[Step], float]] | None = None
) -> dict[str, Any]:
    """Latencies and tokens a second of a load; each step's work and seconds go to `seen`."""
    due = iter(asks)
    ask, number, now = next(due, None), 0, 0.0
    records: dict[str, Record] = {}
    while ask is not None or engine.has_work:
        while ask is not None and (ask.due <= now or not engine.has_work):
            now = max(now, ask.due)
            request = real(ask, str(number), engine.kv.max_model_len)
            records[request.id] = Record(ask.due, ask.due, input_tokens=len(request.prompt))
            assert engine.submit(request) is None, "it could never run"
            ask, number = next(due, None), number + 1
        before = {id(seq): seq.computed for siblings in engine.scheduler.requests.values() for seq in siblings}
        live = [seq for siblings in engine.scheduler.requests.values() for seq in siblings]
        begin = time.process_time()
        outputs = engine.step()
        seconds = time.process_time() - begin
        now += seconds
        if seen is not None:
            moved = [(before[id(seq)], seq.computed) for seq in live if seq.computed > before[id(seq)]]
            rows = sum(b - a for a, b in moved)
            if rows == engine.step_tokens:  # nobody ended, was preempted or found a prefix: the work is known
                pairs = sum((b - a) * a + (b - a) * (b - a + 1) // 2 for a, b in moved)
                seen.append((len(moved), [(rows, sum(b for _, b in moved), pairs)], seconds))
        for output in outputs:
            if output.tokens:
                records[output.request_id].chunks.append(now)
                records[output.request_id].output_tokens += len(output.tokens)
    written = sum(record.output_tokens for record in records.values())
    last = max(record.chunks[-1] for record in records.values())
    return {"latency_ms": latencies(list(records.values())),
            "rates": {"output_tokens_per_s": written / last, "completed": len(records)}}  # fmt: skip


def other_load(seed: int, count: int) -> Iterator[SimulatedRequest]:
    """What steps are calibrated with: up to 12 at a time of any length, none of which a trace has."""
    rng = random.Random(f"calibration {seed}")
    for number in range(count):
        length = rng.choice((rng.randint(4, 60), rng.randint(60, 300), rng.randint(300, 1700)))
        output = rng.randint(4, 40)
        yield SimulatedRequest(0.15 * number, ((1 + seed * 10_000 + number, length),), output, ANSWER + number)
