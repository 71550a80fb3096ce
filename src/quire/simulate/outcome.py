"""One simulation and what it gave: figures as a benchmark has them, a row for the dashboard, curves over time.

Tenants, and the tries of a search, are shown on the terminal beside a benchmark's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.core.config import EngineConfig
from quire.figures.machine import now, this_engine, this_machine
from quire.figures.metric_definitions import PERCENTILES
from quire.figures.schema import FigureRow, RowMachine, RowModel
from quire.figures.schema import RowLoad as AskedLoad
from quire.simulate.design import TimedDesign
from quire.simulate.parallel_cells import CellResult, run_cells
from quire.simulate.requests import RequestStream
from quire.simulate.timeline import Design


@dataclass(frozen=True)
class SimulationResult:
    """`results`: for `bench.report`; `metrics`: by the names of `figures.metric_definitions`; `tenants`: of each."""

    results: dict[str, Any]
    metrics: dict[str, float]
    tenants: dict[str, dict[str, float]]

    def holds(self, limits: Mapping[str, float], percentile: str) -> bool:
        """Whether every request was answered, and the percentile of each latency is within its limit (ms)."""
        found = {name: self.metrics.get(f"{name}_ms_{percentile}", 0.0) for name in limits}
        return not self.metrics["failed"] and all(found[name] <= limit for name, limit in limits.items())


def simulate(
    made: TimedDesign,
    asked: RequestStream,
    targets: Mapping[str, float],
    replicas: int = 0,
    on_done: Callable[[], None] = lambda: None,
) -> SimulationResult:
    """Run a load; on so many replicas where the design's are not meant."""
    design = replace(made.design, replicas=replicas) if replicas else made.design
    part = run_cells(design, asked, targets, made.cells, on_done)
    results = part.measures(targets).results(part.last)
    results["engine"] = _of_engines(part, design)
    results["curve"] = [point._asdict() for point in part.curve]
    results["notes"] = list(made.notes) + (asked.trace.notes if asked.trace is not None else [])
    tenants = {name: _metrics(found) for name, found in results.get("tenants", {}).items()}
    return SimulationResult(results, _metrics(results) | _named(part), tenants)


def _of_engines(part: CellResult, design: Design) -> dict[str, float]:
    """What the engines did, by the words of the report."""
    found = _named(part)
    names = ("kv_used", "batch_rows", "busy_share", "prefix_hit_share", "preemptions", "steps", "replica_seconds")
    shown = {name: found[name] for name in names if name in found}
    told = {"replicas_lost": part.deaths, "moved_to_others": part.moved, "blocks_read": part.read_blocks}
    shown |= {name: value for name, value in told.items() if value}
    return shown | ({"most_replicas": max(p.replicas for p in part.curve)} if design.autoscale else {})


def _named(part: CellResult) -> dict[str, float]:
    found: dict[str, float] = {
        "steps": part.steps,
        "batch_rows": part.rows / max(1, part.steps),
        "busy_share": part.busy / max(1e-9, part.replica_seconds),
        "replica_seconds": part.replica_seconds,
        "preemptions": part.preemptions,
        "deaths": part.deaths,
        "kv_used": sum(point.kv for point in part.curve) / max(1, len(part.curve)),
    }
    return found | ({"prefix_hit_share": part.hits / part.queries} if part.queries else {})


def _metrics(results: Mapping[str, Any]) -> dict[str, float]:
    rates = results["rates"]
    found = {
        "output_tokens_per_s": rates["output_tokens_per_s"],
        "total_tokens_per_s": rates["total_tokens_per_s"],
        "requests_per_s": rates["requests_per_minute"] / 60,
        "duration_s": rates["duration_s"],
        "failed": float(rates["failed"]),
        "refused": float(results.get("failures", {}).get("429", 0)),
    }
    if "goodput_requests_per_s" in rates:
        found |= {"goodput_per_s": rates["goodput_requests_per_s"], "attainment": rates["attainment"]}
    for name, parts in results["latency_ms"].items():
        found |= {f"{name}_ms_{part}": parts[part] for part in PERCENTILES} if parts else {}
    return found


def rows_of(
    made: TimedDesign, asked: RequestStream, config: EngineConfig, found: SimulationResult, command: str, replicas: int
) -> list[FigureRow]:
    """One for all requests, and one for each tenant where there are several."""
    design, load, options = made.design, asked.load, config.scheduler
    here = this_machine()
    machine = RowMachine(name=made.device, devices=made.devices, memory_bytes=made.memory) if made.device else here
    row = FigureRow(
        kind="simulated", benchmark="simulate", time=now(), command=command, machine=machine, engine=this_engine(),
        model=RowModel(name=config.model.model or "pydoc", format=config.model.quantization or config.model.dtype,
                    kv_format=made.kv_format),
        load=AskedLoad(
            requests=len(asked), batch=0, input_len=asked.means[0], output_len=asked.means[1],
            arrivals=asked.arrivals, rate=asked.rate, shared_prefix=load.shared_prefix, name=asked.name,
        ),
        options={
            "replicas": replicas or design.replicas, "router": design.router, "prefill_replicas": design.prefill,
            "cells": made.cells,
            "max_num_seqs": options.max_num_seqs, "max_num_batched_tokens": options.max_num_batched_tokens,
            "enable_chunked_prefill": options.enable_chunked_prefill, "scheduling_policy": options.scheduling_policy,
            "enable_prefix_caching": design.setup.prefix_caching, "num_blocks": design.setup.blocks,
            "block_size": design.setup.block_size, "mtbf": design.mtbf, "seed": design.seed,
        },
        metrics=found.metrics, notes=found.results["notes"],
    )  # fmt: skip
    return [row, *(_of_tenant(row, name, metrics) for name, metrics in found.tenants.items())]


def _of_tenant(row: FigureRow, tenant: str, metrics: dict[str, float]) -> FigureRow:
    from msgspec.structs import replace as with_

    return with_(row, options=row.options | {"tenant": tenant}, metrics=metrics)


COLUMNS = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "output_tokens_per_s", "requests_per_s", "failed")


def show_tenants(found: SimulationResult) -> None:
    """A line for each, where there are several; why requests failed."""
    console = Console(highlight=False)
    for why, count in found.results.get("failures", {}).items():
        console.print(f"failed: {count:,} ({why})")
    if not found.tenants:
        return
    table = Table(title="tenants")
    table.add_column("")
    for column in COLUMNS:
        table.add_column(column.replace("_", " "), justify="right")
    for name, metrics in found.tenants.items():
        table.add_row(name, *(f"{metrics[c]:,.2f}" if c in metrics else "" for c in COLUMNS))
    console.print(table)


def show_try(replicas: int, found: SimulationResult, limits: Mapping[str, float], percentile: str, held: bool) -> None:
    """One line of a search."""
    parts = [f"{name} {found.metrics.get(f'{name}_ms_{percentile}', 0.0):,.1f} ms" for name in limits]
    failed = f", {found.metrics['failed']:,.0f} failed" if found.metrics["failed"] else ""
    print(
        f"{replicas} replicas: {percentile} of {', '.join(parts)}{failed}: {'held' if held else 'not held'}", flush=True
    )
