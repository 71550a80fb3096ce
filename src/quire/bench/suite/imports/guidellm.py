"""What GuideLLM writes as benchmarks.json: a benchmark for each rate, each metric as distributions by how requests end.

Its time per output token includes the time to the first; what it calls inter-token latency is a request's mean gap,
which is quire's TPOT, each request weighted by its tokens.
"""

from __future__ import annotations

from typing import Any

from quire.bench.suite.imports.common import PARTS, count, made, number, numbers, read_json, table, told
from quire.core.errors import ConfigError
from quire.figures.schema import FigureRow, RowEngine, RowLoad, RowModel

LATENCIES = {
    "time_to_first_token_ms": ("ttft", 1.0),
    "inter_token_latency_ms": ("tpot", 1.0),
    "time_per_output_token_ms": ("tpot_guidellm", 1.0),
    "request_latency": ("e2e", 1e3),
}
DIALECT = {
    "tpot": "GuideLLM's inter-token latency: (last token - first token) / (output tokens - 1), weighted by tokens",
    "tpot_guidellm": "GuideLLM's time per output token: request latency / output tokens, weighted by tokens",
    "output_tokens_per_s": "mean of a distribution over time",
    "total_tokens_per_s": "mean of a distribution over time",
    "requests_per_s": "mean of a distribution over time",
}
RATES = {
    "requests_per_second": "requests_per_s",
    "output_tokens_per_second": "output_tokens_per_s",
    "tokens_per_second": "total_tokens_per_s",
}
KINDS = {"synchronous": "closed", "concurrent": "closed", "throughput": "at-once", "constant": "constant",
         "poisson": "poisson", "async": "constant"}  # fmt: skip


def knows(found: Any) -> bool:
    """Whether a JSON value is one of its reports."""
    each = table(found).get("benchmarks")
    return isinstance(each, list) and bool(each) and "metrics" in table(each[0])


def read(text: str, where: str) -> list[FigureRow]:
    """A row for each benchmark."""
    found = table(read_json(text, where))
    if not knows(found):
        raise ConfigError(f"{where}: no benchmarks with metrics in it")
    rows = [_row(one, found) for one in map(table, found["benchmarks"]) if table(one.get("metrics"))]
    if not (rows := [row for row in rows if row.metrics]):
        raise ConfigError(f"{where}: no benchmarks with metrics in it")
    return rows


def _row(one: dict[str, Any], report: dict[str, Any]) -> FigureRow:
    given = table(one["metrics"])
    metrics: dict[str, Any] = {ours: _good(given, theirs).get("mean") for theirs, ours in RATES.items()}
    for theirs, (ours, scale) in LATENCIES.items():
        spread = _good(given, theirs)
        spread = table(spread.get("percentiles")) | {"mean": spread.get("mean"), "p50": spread.get("median")}
        found = ((f"{ours}_ms_{part}", number(spread.get(part))) for part in PARTS)
        metrics |= {name: scale * value for name, value in found if value is not None}
    totals = table(given.get("request_totals")) or table(table(one.get("run_stats")).get("requests_made"))
    metrics |= {"duration_s": one.get("duration"), "failed": totals.get("errored")}
    strategy = _strategy(one)
    kind = told(strategy.get("type_")) or told(strategy.get("type"))
    rate = number(strategy.get("rate")) or 0.0
    at_once = number(strategy.get("streams")) or number(strategy.get("max_concurrency"))
    return made(
        "guidellm",
        metrics=numbers(metrics),
        engine=RowEngine(name="openai"),
        model=RowModel(name=_model(one, report)),
        load=RowLoad(
            requests=count(totals.get("successful"), 1),
            batch=1 if kind == "synchronous" else int(at_once or 0),
            input_len=number(_good(given, "prompt_token_count").get("mean")) or 0.0,
            output_len=number(_good(given, "output_token_count").get("mean")) or 0.0,
            arrivals=KINDS.get(kind, kind or "at-once"),
            rate=rate if kind in ("constant", "poisson", "async") else 0.0,
        ),
        dialect=DIALECT,
    )


def _good(metrics: dict[str, Any], name: str) -> dict[str, Any]:
    """The distribution of requests that were answered."""
    return table(table(metrics.get(name)).get("successful"))


def _strategy(one: dict[str, Any]) -> dict[str, Any]:
    """Where its versions keep it: `config` since 0.4, `args` before."""
    for place in ("config", "args", "scheduler"):
        if found := table(table(one.get(place)).get("strategy")):
            return found
    return {}


def _model(one: dict[str, Any], report: dict[str, Any]) -> str:
    for place in (table(one.get("config")).get("backend"), table(one.get("args")).get("backend"), one.get("worker"),
                  one.get("backend"), report.get("args"), report.get("config")):  # fmt: skip
        found = table(place)
        for name in ("model", "backend_model", "target_model"):
            if model := told(found.get(name)):
                return model
    return "unknown"
