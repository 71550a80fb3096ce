"""Rows as a page carries them: distinct values once, rows as places among them, and all of it compressed."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.dashboard.gather import File
from quire.figures.metrics import LIMITS, METRICS, Metric
from quire.figures.schema import FigureRow, fields

DISTINCT = ("kind", "benchmark", "suite", "time", "command", "machine", "engine", "model", "load", "technique", "on",
            "improves", "claim", "options", "dialect", "notes")  # fmt: skip
"""Fields of which many rows have the same value. The order is that of a row's places."""
WHOLE = 1 << 53
"""Below it whole numbers are kept to the last digit."""


class Distinct:
    """Values in the order in which they were first seen."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[bytes, int] = {}

    def place(self, value: Any) -> int:
        """Place of a value among them."""
        key = msgspec.json.encode(value)
        place = self._places.setdefault(key, len(self.values))
        if place == len(self.values):
            self.values.append(value)
        return place


def packed(files: Sequence[File]) -> str:
    """Base64 of gzip of JSON: text that no HTML parser finds anything in.

    `rows`: [file, line, places of `DISTINCT`, metrics, intervals, samples]; each of the last three begins with the
    place of its names.
    """
    values, names = {name: Distinct() for name in DISTINCT}, Distinct()
    rows = [
        [at, number, [values[name].place(getattr(row, name)) for name in DISTINCT], *_numbers(row, names)]
        for at, file in enumerate(files)
        for number, row in enumerate(file.rows)
    ]
    document = {
        "about": {
            "metrics": {name: _about(metric) for name, metric in METRICS.items()},
            "limits": {name: _about(metric) for name, metric in LIMITS.items()},
            "fields": {name: meaning for name, _, meaning in fields()},
        },
        "files": [file.name for file in files],
        "distinct": DISTINCT,
        "values": {name: each.values for name, each in values.items()},
        "names": names.values,
        "rows": rows,
    }
    return base64.b64encode(gzip.compress(msgspec.json.encode(document), 6, mtime=0)).decode()


def _about(metric: Metric) -> list[str]:
    return [metric.unit, metric.better, metric.definition]


def _numbers(row: FigureRow, names: Distinct) -> list[list[Any]]:
    return [
        [names.place(list(row.metrics)), *map(_short, row.metrics.values())],
        [names.place(list(row.intervals)), *([_short(i.low), _short(i.high)] for i in row.intervals.values())],
        [names.place(list(row.samples)), *([*map(_short, found)] for found in row.samples.values())],
    ]


def _short(value: float) -> float | int:
    """A number with 7 digits, whole ones as they are: more are noise, and a page of 50,000 rows is half as large."""
    if value.is_integer():
        return int(value) if -WHOLE < value < WHOLE else value
    return float(f"{value:.7g}")  # nan and inf stay, for which JSON has null
