"""What importers share: rows with what is known, and the edges of files that may be broken."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from typing import Any

from quire.core.errors import ConfigError
from quire.figures.schema import FigureRow, RowEngine, RowLoad, RowMachine, RowModel

UNKNOWN = "unknown"
PARTS = ("mean", "p50", "p90", "p95", "p99")


def made(
    tool: str,
    *,
    metrics: Mapping[str, float],
    engine: RowEngine,
    model: RowModel,
    load: RowLoad,
    machine: RowMachine | None = None,
    dialect: Mapping[str, str] | None = None,
    **more: Any,
) -> FigureRow:
    """A row of `tool`. `dialect` by the metric's name, or by its beginning up to `_ms`; kept for metrics there are."""
    spoken = {}
    for name in metrics:
        how = (dialect or {}).get(name) or (dialect or {}).get(name.partition("_ms")[0])
        if how:
            spoken[name] = how
    return FigureRow(
        kind="imported",
        benchmark=tool,
        machine=machine or RowMachine(name=UNKNOWN),
        engine=engine,
        model=model,
        load=load,
        metrics={name: float(value) for name, value in metrics.items()},
        dialect=spoken,
        **more,
    )


def number(value: Any) -> float | None:
    """A finite number, or text of one, thousands perhaps parted by commas; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        found = float(value.replace(",", "") if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def count(value: Any, otherwise: int = 0) -> int:
    """A whole number."""
    found = number(value)
    return otherwise if found is None else int(found)


def told(value: Any) -> str:
    """Text of a scalar; "" for nothing."""
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def table(value: Any) -> dict[str, Any]:
    """A JSON object, or an empty one."""
    return value if isinstance(value, dict) else {}


def numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """Values of `found` that are numbers."""
    return {name: value for name, given in found.items() if (value := number(given)) is not None}


def read_csv(text: str, where: str) -> list[dict[str, str]]:
    """Rows by the names of columns, spaces around either dropped; empty rows left out."""
    try:
        rows = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise ConfigError(f"{where}: not CSV: {error}") from None
    rows = [[cell.strip() for cell in row] for row in rows if any(cell.strip() for cell in row)]
    names = rows[0] if rows else []
    return [dict(zip(names, row, strict=False)) for row in rows[1:]]


def read_json(text: str, where: str) -> Any:
    """One JSON value."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
