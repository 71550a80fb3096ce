"""A trace of any known layout, found out by how it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from quire.bench.traces import azure, burstgpt, flights, mooncake
from quire.bench.traces.trace import MAX_REQUESTS, Trace, Traced, lines_of
from quire.core.errors import ConfigError

READERS: dict[str, Callable[[Path], Iterator[Traced]]] = {
    "mooncake": mooncake.read,
    "azure": azure.read,
    "burstgpt": burstgpt.read,
    "recording": flights.read,
}


def layout_of(path: Path) -> str:
    """Find the layout by what `path` is and begins with. `ConfigError` where that is none of those known."""
    if path.is_dir():
        return "recording"
    first = next((text for _, text in lines_of(path)), "")
    if first.startswith("{"):
        return "mooncake"
    head = [cell.strip() for cell in first.split(",")]
    for name, columns in (("azure", azure.COLUMNS), ("burstgpt", burstgpt.COLUMNS)):
        if set(columns) <= set(head):
            return name
    raise ConfigError(
        f"--trace {path}: begins with {first[:60]!r}, as no known trace does; --trace-layout names one of "
        f"{', '.join(READERS)}",
        param="trace",
    )


def read_trace(path: Path, layout: str = "", limit: int = 0) -> Trace:
    """The first `limit` requests (0 = all) that were answered, in order of time, which begins at 0.

    `ConfigError` names the line of a file that is broken, or says that nothing is in it.
    """
    if layout not in ("", *READERS):
        raise ConfigError(f"--trace-layout {layout}: known are {', '.join(READERS)}", param="trace_layout")
    name = layout or layout_of(path)
    trace = Trace(name, block_size=mooncake.BLOCK if name == "mooncake" else 0)
    for request in READERS[name](path):
        if not request.input_tokens or not request.output_tokens:
            trace.skipped += 1
            continue
        trace.requests.append(request)
        if len(trace.requests) == (limit or MAX_REQUESTS + 1):
            break
    if len(trace.requests) > MAX_REQUESTS:
        raise ConfigError(f"--trace {path}: has more than {MAX_REQUESTS:,} requests; --num-prompts takes the first")
    if not trace.requests:
        raise ConfigError(f"--trace {path}: holds no answered request", param="trace")
    if trace.skipped:
        trace.notes.append(f"{trace.skipped} requests of the trace have no prompt or no answer: left out")
    trace.requests.sort(key=lambda request: request.at)
    start = trace.requests[0].at
    trace.requests = [replace(request, at=request.at - start) for request in trace.requests]
    return trace
