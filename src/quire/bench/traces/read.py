"""A trace of any known layout, found out by how it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from quire.bench.traces.trace import MAX_REQUESTS, Trace, Traced, lines_of, seconds, table, tokens
from quire.core.errors import ConfigError
from quire.engine.record.recording import read_run

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Model", "Request tokens", "Response tokens")
"""Columns of their files."""
BLOCK = 512
"""Tokens of a block of Mooncake."""


def read_mooncake(path: Path) -> Iterator[Traced]:
    """Read the requests of a trace of Mooncake (Qin et al., FAST 2025), in the file's order.

    JSON lines of timestamp (ms), input_length, output_length and hash_ids. Each hash id names a block of 512 tokens of
    the prompt and all before it; the last block may be shorter.
    """
    for number, text in lines_of(path):
        where = f"{path}, line {number}"
        try:
            found = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{where} is no JSON object")
        if missing := [name for name in ("timestamp", "input_length", "output_length") if name not in found]:
            raise ConfigError(f"{where} has no {missing[0]!r}")
        read = tokens(found["input_length"], where, "input_length")
        yield Traced(
            at=seconds(found["timestamp"], where, "timestamp") / 1e3,
            input_tokens=read,
            output_tokens=tokens(found["output_length"], where, "output_length"),
            blocks=_blocks(found.get("hash_ids") or (), read, where),
        )


def _blocks(ids: object, length: int, where: str) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or any(type(i) is not int for i in ids):
        raise ConfigError(f"{where}: hash_ids is no list of whole numbers")
    if ids and len(ids) != -(-length // BLOCK):
        raise ConfigError(f"{where}: {len(ids)} hash_ids are not the blocks of {BLOCK} that {length} tokens fill")
    return tuple(ids)


def read_azure(path: Path) -> Iterator[Traced]:
    """Read the requests of a trace of Azure (Patel et al., ISCA 2024): CSV in the file's order."""
    for where, row in table(path, AZURE):
        yield Traced(
            at=_time(row["TIMESTAMP"], where),
            input_tokens=tokens(row["ContextTokens"], where, "ContextTokens"),
            output_tokens=tokens(row["GeneratedTokens"], where, "GeneratedTokens", least=0),
        )


def _time(text: str, where: str) -> float:
    """Seconds since 1970 of a date with up to seven digits behind the second, UTC where nothing else is said."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{where}: TIMESTAMP is {text[:40]!r}, not like 2023-11-16 18:15:46.6805900") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def read_burstgpt(path: Path) -> Iterator[Traced]:
    """Read the requests of a trace of BurstGPT (Wang et al., 2024): CSV in the file's order, times in seconds.

    A response of no tokens is a request that failed.
    """
    for where, row in table(path, BURSTGPT):
        yield Traced(
            at=seconds(row["Timestamp"], where, "Timestamp"),
            input_tokens=tokens(row["Request tokens"], where, "Request tokens", least=0),
            output_tokens=tokens(row["Response tokens"], where, "Response tokens", least=0),
        )


def read_recording(path: Path) -> Iterator[Traced]:
    """Read the requests of the last run in a folder of `quire serve --record`, with prompts that were recorded.

    One of several sequences is as long as its longest.
    """
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


READERS: dict[str, Callable[[Path], Iterator[Traced]]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "recording": read_recording,
}


def layout_of(path: Path) -> str:
    """Find the layout by what `path` is and begins with. `ConfigError` where that is none of those known."""
    if path.is_dir():
        return "recording"
    first = next((text for _, text in lines_of(path)), "")
    if first.startswith("{"):
        return "mooncake"
    head = [cell.strip() for cell in first.split(",")]
    for name, columns in (("azure", AZURE), ("burstgpt", BURSTGPT)):
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
    trace = Trace(name, block_size=BLOCK if name == "mooncake" else 0)
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
