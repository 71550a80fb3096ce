"""Results as a table on the terminal and as JSON in a file."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

import quire
from quire.bench.records import DEFINITIONS
from quire.core.config import cpu_count
from quire.core.errors import ConfigError
from quire.core.machine import processor

GUIDELLM = {"TPOT": "time_per_output_token", "ITL": "inter_token_latency"}
"""Those of its figures that are none of ours; AIPerf's ITL is our tpot, its inter-chunk latency our itl."""
NAMES = {"prompt_tokens_per_s": "prompt tokens/s (pp)", "generation_tokens_per_s": "generation tokens/s (tg)"}
"""Rates that are shown under the names of llama-bench, too."""
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def report(kind: str, load: object, setting: Any, results: dict[str, Any], output: Path | None) -> None:
    """Print `results` and write them with everything needed to repeat them. `setting`: the engine's facts, or None."""
    console = Console(highlight=False)
    _print_rates(console, kind, results)
    _print_latencies(console, results)
    if results.get("clocks"):
        _print_parts(console, results["clocks"])
    if "sweep" in results:
        _print_sweep(console, results["sweep"], results["knee"])
    if "kv_waste" in results:
        _print_waste(console, results["kv_waste"])
    for note in results.get("notes", ()):
        console.print(f"note: {note}", markup=False)
    if failed := results.get("failed"):
        console.print("failed: " + ", ".join(f"{count} {kind}" for kind, count in failed.items()), markup=False)
    for error in results.get("errors", ()):
        console.print(f"error: {error}", markup=False)
    if output is not None:
        document = {
            "benchmark": kind,
            "quire": quire.__version__,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": {"processor": processor(), "cores": cpu_count(), "system": platform.system()},
            "load": msgspec.to_builtins(load),
            "engine": msgspec.to_builtins(setting),
            "results": results,
            "definitions": DEFINITIONS,
        }
        try:
            output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {output}: {error.strerror}", param="output") from None


def _print_rates(console: Console, kind: str, results: dict[str, Any]) -> None:
    table = Table(title=kind, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in (results["rates"] | results.get("engine", {})).items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
        table.add_row(NAMES.get(name) or name.replace("_", " "), shown)
    console.print(table)


def _print_latencies(console: Console, results: dict[str, Any]) -> None:
    table = Table(title="latency in milliseconds")
    table.add_column("")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    rows = dict(results["latency_ms"])
    rows |= {f"{name} from due time": found for name, found in results.get("from_intended_ms", {}).items()}
    told = results.get("dialects_ms", {}).get("guidellm", {})
    rows |= {f"GuideLLM's {short}": told.get(name) for short, name in GUIDELLM.items()}
    rows["sent late by"] = results.get("client_ms")
    for name, found in rows.items():
        if found is not None:
            table.add_row(name, *(f"{found[c]:,.2f}" for c in COLUMNS))
    console.print(table)


def _print_parts(console: Console, found: dict[str, Any]) -> None:
    """Where the time went: by the clocks of client and server, of all requests and of the slowest."""
    title = f"where the time went, {found['requests']} requests"
    table = Table(title=title, caption=f"the server's clock is {found['offset_ms']:+.3f} ms from ours")
    slow = found["slowest_requests"]
    for column in ("milliseconds", "mean", "p50", "p90", "p99", f"mean of the slowest {slow}"):
        table.add_column(column, justify="left" if column == "milliseconds" else "right")
    for name, each in found["parts_ms"].items():
        cells = [each[column] for column in ("mean", "p50", "p90", "p99")] + [found["slowest_mean_ms"][name]]
        table.add_row(name, *(f"{cell:,.2f}" for cell in cells))
    console.print(table)


def _print_sweep(console: Console, points: list[dict[str, Any]], knee: dict[str, Any]) -> None:
    """A line for each load, and where the knee is."""
    kind, bounded = next(iter(knee)), knee["bounded"]
    at = knee[kind]
    where = f"knee: {kind} {at:,.2f}" if at else "no load was held"
    table = Table(title=f"sweep, {where}{'' if bounded or not at else ' at least'}")
    columns = (kind, "answered_per_s", "output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "e2e_ms_p99")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    table.add_column("")
    for point in points:
        cells = (point.get(column) for column in columns)
        table.add_row(*("" if c is None else f"{c:,.2f}" for c in cells), "held" if point["held"] else "")
    console.print(table)


def _print_waste(console: Console, waste: dict[str, dict[str, float]]) -> None:
    table = Table(title="KV memory reserved and not holding a token")
    table.add_column("")
    table.add_column("mean", justify="right")
    table.add_column("max", justify="right")
    for name, found in waste.items():
        table.add_row(name.replace("_", " "), f"{found['mean']:.1%}", f"{found['max']:.1%}")
    console.print(table)
