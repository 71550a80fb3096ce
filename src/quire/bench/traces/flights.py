"""Recordings of `quire serve --record`: arrivals, lengths, and the prompts where those were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quire.bench.traces.trace import Traced
from quire.engine.record.recording import read_run


def read(path: Path) -> Iterator[Traced]:
    """The requests of a folder's last run; one of several sequences is as long as its longest."""
    run = read_run(path)
    for asked in run.asked:
        request = asked.request
        ends = (run.ends.get((request.id, index)) for index in range(request.params.n))
        counts = [end.count for end in ends if end is not None]
        yield Traced(
            at=asked.at,
            input_tokens=asked.prompt_tokens,
            output_tokens=max(counts, default=request.params.max_tokens or 0),
            prompt=request.prompt,
        )
