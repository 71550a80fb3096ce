"""Run requests through an engine, noting when every token came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from quire.bench.records import Record
from quire.core.errors import EngineFailure
from quire.core.request import Request
from quire.engine.client import EngineClient, StepReport
from quire.engine.local import LocalEngine

WAIT = 0.5
"""Seconds to wait for a report, at most, before it is looked what is due."""


def drive(
    engine: EngineClient,
    requests: Sequence[Request],
    on_step: Callable[[StepReport], None] | None = None,
    due: Sequence[float] = (),
) -> tuple[list[Record], float]:
    """Submit each when it is `due`, in seconds from the start, or all at once, and go on until all are done: (records
    in order, seconds to the last token).

    Latencies count from when a request was due: a client does not wait for steps. `EngineFailure` if one fails.
    """
    start, due = time.perf_counter(), due or [0.0] * len(requests)
    records = {
        request.id: Record(intended=start + at, sent=start + at, input_tokens=len(request.prompt))
        for request, at in zip(requests, due, strict=True)
    }
    sent, left = 0, len(requests)
    while left:
        wait = WAIT
        if sent < len(requests):
            now = time.perf_counter() - start
            while sent < len(requests) and due[sent] <= now:
                engine.submit(requests[sent])
                sent += 1
            wait = min(WAIT, due[sent] - now) if sent < len(requests) else WAIT
            if sent == len(requests) - left:  # nothing is under way
                time.sleep(wait)
                continue
        report = engine.poll(wait)
        if report is None:
            if isinstance(engine, LocalEngine):
                raise EngineFailure(f"the engine stopped with {left} requests unfinished")
            continue
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
