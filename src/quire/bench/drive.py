"""Run requests through an engine in this process, noting when every token came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from quire.bench.records import Record
from quire.core.errors import EngineFailure
from quire.core.request import Request
from quire.engine.client import StepReport
from quire.engine.local import LocalEngine


def drive(
    engine: LocalEngine, requests: Sequence[Request], on_step: Callable[[StepReport], None] | None = None
) -> tuple[list[Record], float]:
    """Submit all at once, step until all are done: (records in order, seconds). Raises `EngineFailure` if one fails."""
    start = time.perf_counter()
    records = {r.id: Record(intended=start, sent=start, input_tokens=len(r.prompt)) for r in requests}
    for request in requests:
        engine.submit(request)
    left = len(records)
    while left:
        report = engine.poll(0.0)
        if report is None:
            raise EngineFailure(f"the engine stopped with {left} requests unfinished")
        now = time.perf_counter()
        for output in report.outputs:
            record = records[output.request_id]
            if output.finish_reason == "error":
                raise EngineFailure(f"{output.request_id}: {output.error}")
            if output.tokens:
                record.chunks.append(now)
                record.output_tokens += len(output.tokens)
            left -= output.finish_reason is not None
        if on_step is not None:
            on_step(report)
    return list(records.values()), time.perf_counter() - start
