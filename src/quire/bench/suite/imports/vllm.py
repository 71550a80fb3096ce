"""What `vllm bench serve --save-result`, `vllm bench latency` and `throughput --output-json` write: a JSON object each.

Its TTFT, TPOT, ITL and E2EL are quire's (`quire.figures.metric_definitions`): those of serve need no dialect.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from quire.bench.suite.imports.common import count, made, number, numbers, read_json, table, told
from quire.core.errors import ConfigError
from quire.figures.schema import FigureRow, RowEngine, RowLoad, RowModel

NAMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e"}
RATES = {
    "request_throughput": "requests_per_s",
    "request_goodput": "goodput_per_s",
    "output_throughput": "output_tokens_per_s",
    "total_token_throughput": "total_tokens_per_s",
    "duration": "duration_s",
    "failed": "failed",
}
LATENCY = {"e2e": "latency of one batch: all of its requests start and end together", "duration_s": "mean of a batch"}
THROUGHPUT = {"output_tokens_per_s": "output tokens / time of all requests, offline: all are there from the start"}


def knows(found: Any) -> bool:
    """Whether a JSON value is one of the three."""
    names = table(found).keys()
    kinds = {"request_throughput", "completed"}, {"avg_latency", "latencies"}, {"elapsed_time", "num_requests"}
    return any(kind <= names for kind in kinds)


def read(text: str, where: str) -> list[FigureRow]:
    """The row of a file."""
    found = table(read_json(text, where))
    if not knows(found):
        raise ConfigError(f"{where}: no result of vllm bench serve, latency or throughput")
    if "request_throughput" in found:
        return [_serve(found)]
    return [_latency(found, where) if "avg_latency" in found else _throughput(found)]


def _model(found: dict[str, Any]) -> RowModel:
    return RowModel(name=told(found.get("model_id")) or told(table(found.get("args")).get("model")) or "unknown")


def _serve(found: dict[str, Any]) -> FigureRow:
    metrics = {ours: found.get(theirs) for theirs, ours in RATES.items()}
    for theirs, ours in NAMES.items():
        metrics[f"{ours}_ms_mean"] = found.get(f"mean_{theirs}_ms")
        metrics[f"{ours}_ms_p50"] = found.get(f"median_{theirs}_ms")
        for name in found:
            if part := re.fullmatch(rf"p(90|95|99)_{theirs}_ms", name):
                metrics[f"{ours}_ms_p{part[1]}"] = found[name]
    requests = count(found.get("completed")) or count(found.get("num_prompts"), 1)
    rate = number(found.get("request_rate")) or 0.0  # "inf" is none
    burst = number(found.get("burstiness")) or 1.0
    most = count(found.get("max_concurrency"))
    kind = ("poisson" if burst == 1.0 else "gamma") if rate else "closed" if most else "at-once"
    return made(
        "vllm-serve",
        metrics=numbers(metrics),
        engine=RowEngine(name=told(found.get("backend")) or told(found.get("endpoint_type")) or "vllm"),
        model=_model(found),
        load=RowLoad(
            requests=count(found.get("num_prompts"), requests),
            batch=most,
            input_len=count(found.get("total_input_tokens")) / requests,
            output_len=count(found.get("total_output_tokens")) / requests,
            arrivals=kind,
            rate=rate,
        ),
        time=_time(told(found.get("date"))),
    )


def _time(date: str) -> str:
    """20250801-093015 as ISO 8601; of no known zone."""
    part = re.fullmatch(r"(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)", date)
    return "{}-{}-{}T{}:{}:{}".format(*part.groups()) if part else date


def _latency(found: dict[str, Any], where: str) -> FigureRow:
    seconds = [value for given in found["latencies"] if (value := number(given)) is not None] if isinstance(
        found["latencies"], list) else []  # fmt: skip
    if not seconds or any(value <= 0 for value in seconds):
        raise ConfigError(f"{where}: latencies are no list of seconds")
    spread = dict(zip(("p50", "p90", "p95", "p99"), np.percentile(seconds, (50, 90, 95, 99)).tolist(), strict=True))
    metrics = {f"e2e_ms_{part}": 1e3 * value for part, value in spread.items()}
    metrics |= {"e2e_ms_mean": 1e3 * math.fsum(seconds) / len(seconds), "duration_s": math.fsum(seconds) / len(seconds)}
    args = table(found.get("args"))
    batch, reads, writes = (count(args.get(name)) for name in ("batch_size", "input_len", "output_len"))
    load = RowLoad(requests=batch or 1, batch=batch or 1, input_len=reads, output_len=writes)
    return made("vllm-latency", metrics=metrics, engine=RowEngine(name="vllm"), model=_model(found), load=load,
                dialect=LATENCY, samples={"e2e_ms_p50": [1e3 * value for value in seconds]})  # fmt: skip


def _throughput(found: dict[str, Any]) -> FigureRow:
    seconds, requests = number(found["elapsed_time"]), count(found["num_requests"], 1)
    written, tokens = count(found.get("total_output_tokens")), count(found.get("total_num_tokens"))
    metrics = {"duration_s": seconds, "requests_per_s": found.get("requests_per_second"),
               "total_tokens_per_s": found.get("tokens_per_second")}  # fmt: skip
    if written and seconds:
        metrics["output_tokens_per_s"] = written / seconds
    read_tokens = tokens - written if written else 0
    load = RowLoad(requests=requests, batch=0, input_len=read_tokens / requests, output_len=written / requests)
    return made("vllm-throughput", metrics=numbers(metrics), engine=RowEngine(name="vllm"), model=_model(found),
    load=load,
                dialect=THROUGHPUT)  # fmt: skip
