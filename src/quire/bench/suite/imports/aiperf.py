"""What NVIDIA's AIPerf writes: profile_export_aiperf.json or .csv (and GenAI-Perf's CSV, which it grew out of).

Its inter-token latency is (request latency - time to first token) / (output tokens - 1) of each request: quire's TPOT.
"""

from __future__ import annotations

import csv
import io
import re
from typing import Any

from quire.bench.suite.imports.common import PARTS, count, made, number, numbers, read_json, table, told
from quire.core.errors import ConfigError
from quire.figures.schema import FigureRow, RowEngine, RowLoad, RowModel

LATENCIES = {"time_to_first_token": "ttft", "inter_token_latency": "tpot", "request_latency": "e2e"}
RATES = {
    "output_token_throughput": "output_tokens_per_s",
    "total_token_throughput": "total_tokens_per_s",
    "request_throughput": "requests_per_s",
    "goodput": "goodput_per_s",
    "benchmark_duration": "duration_s",
    "error_request_count": "failed",
}
DIALECT = {
    "tpot": "AIPerf's inter-token latency: (request latency - ttft) / (output tokens - 1), one value per request"
}
TO_MS = {"ms": 1.0, "s": 1e3, "sec": 1e3, "us": 1e-3, "ns": 1e-6}
TO_S = {"sec": 1.0, "s": 1.0, "ms": 1e-3, "ns": 1e-9}


def knows(text: str, found: Any = None) -> bool:
    """Whether a text, or the JSON value it is, is a summary of it."""
    if found is not None:
        return "request_latency" in table(found) and "request_throughput" in table(found)
    return text.lstrip().startswith("Metric,avg")


def read(text: str, where: str) -> list[FigureRow]:
    """The row of a run."""
    found = table(read_json(text, where)) if text.lstrip().startswith("{") else _from_csv(text, where)
    metrics: dict[str, Any] = {}
    for theirs, ours in LATENCIES.items():
        spread = table(found.get(theirs))
        scale = _scale(spread, TO_MS, where, theirs)
        values = ((f"{ours}_ms_{part}", number(spread.get("avg" if part == "mean" else part))) for part in PARTS)
        metrics |= {name: scale * value for name, value in values if value is not None}
    for theirs, ours in RATES.items():
        spread = table(found.get(theirs))
        value = number(spread.get("avg"))
        if value is not None:
            metrics[ours] = value * (_scale(spread, TO_S, where, theirs) if ours == "duration_s" else 1.0)
    if not metrics:
        raise ConfigError(f"{where}: no metric of AIPerf in it")
    return [_row(found, numbers(metrics))]


def _row(found: dict[str, Any], metrics: dict[str, float]) -> FigureRow:
    config = table(found.get("input_config"))
    load, endpoint = table(config.get("loadgen")), table(config.get("endpoint"))
    rate, most = number(load.get("request_rate")) or 0.0, count(load.get("concurrency"))
    names = endpoint.get("model_names")
    model = told(names[0]) if isinstance(names, list) and names else told(found.get("model"))
    mode = told(load.get("request_rate_mode")) or told(load.get("arrival_pattern"))
    return made(
        "aiperf",
        metrics=metrics,
        engine=RowEngine(name="openai"),
        model=RowModel(name=model or "unknown"),
        load=RowLoad(
            requests=count(table(found.get("request_count")).get("avg"), 1),
            batch=most,
            input_len=number(table(found.get("input_sequence_length")).get("avg")) or 0.0,
            output_len=number(table(found.get("output_sequence_length")).get("avg")) or 0.0,
            arrivals=(mode or "poisson") if rate else "closed",
            rate=rate,
        ),
        dialect=DIALECT,
        time=told(found.get("start_time")),
    )


def _scale(spread: dict[str, Any], units: dict[str, float], where: str, name: str) -> float:
    """What makes of a metric's unit ours; `ConfigError` for one that is not known."""
    unit = told(spread.get("unit"))
    if unit and unit not in units:
        raise ConfigError(f"{where}: {name} is in {unit!r}; known are {', '.join(units)}")
    return units.get(unit, 1.0)


def _from_csv(text: str, where: str) -> dict[str, Any]:
    """Metrics of a CSV file by the names that JSON has: `Time to First Token (ms)` with its columns is
    time_to_first_token, ms."""
    found: dict[str, Any] = {}
    columns: list[str] = []
    try:
        rows = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise ConfigError(f"{where}: not CSV: {error}") from None
    for row in rows:
        if row and row[0].strip() == "Metric":
            columns = [name.strip().lower() for name in row[1:]]
        elif len(row) > 1 and columns and (named := re.fullmatch(r"(.*?)\s*\(([^()]*)\)", row[0].strip())):
            name = named[1].lower().replace(" ", "_").replace("-", "_")
            values = dict(zip(columns, row[1:], strict=False))
            found[name] = values | {"unit": named[2], "avg": values.get("avg", values.get("value"))}
    return found
