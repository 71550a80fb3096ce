"""What the terminal shows of a simulation beside a benchmark's tables: tenants, and the tries of a search."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from quire.simulate.outcome import SimulationResult

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
