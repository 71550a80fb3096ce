"""What each technique buys: rows with it on beside rows with it off, from the same rounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from quire.bench.suite.techniques import TECHNIQUES
from quire.figures.metric_definitions import METRICS
from quire.figures.schema import FigureRow
from quire.figures.statistics import Comparison, compare

THROUGHPUT = "output_tokens_per_s"


@dataclass(frozen=True)
class Pair:
    """One technique under one load: `ratio` of a metric, on / off."""

    on: FigureRow
    off: FigureRow

    @property
    def metric(self) -> str:
        """What the technique is for."""
        found = TECHNIQUES.get(self.on.technique)
        return found.improves if found is not None else THROUGHPUT

    def ratio(self, metric: str) -> Comparison | None:
        """Ratio of the rounds' medians, on / off; None where either has none. One value each says nothing of chance."""
        a = self.on.samples.get(metric) or [self.on.metrics[metric]] if metric in self.on.metrics else []
        b = self.off.samples.get(metric) or [self.off.metrics[metric]] if metric in self.off.metrics else []
        return compare(a, b) if a and b and any(b) else None


def pairs(rows: Iterable[FigureRow]) -> list[Pair]:
    """Rows of one suite, model, engine, machine and load whose technique is on and off; the last of each."""
    found: dict[str, dict[bool, FigureRow]] = {}
    for row in rows:
        if row.technique and row.metrics:
            told = (row.suite, row.technique, row.engine.name, row.machine.name, row.model.name)
            key = msgspec.json.encode((*told, row.load)).decode()
            found.setdefault(key, {})[row.on] = row
    return [Pair(both[True], both[False]) for both in found.values() if len(both) == 2]


def lines(rows: Iterable[FigureRow]) -> list[str]:
    """Lines of each pair: what the technique is for, on and off, with the ratio and its interval; throughput; the
    claim."""
    told = []
    for pair in pairs(rows):
        load, about = pair.on.load, TECHNIQUES.get(pair.on.technique)
        what = f"{load.batch} x {load.input_len:g} -> {load.output_len:g}"
        told.append(f"{pair.on.technique}: {pair.on.model.name}, {what}")
        told += [f"  {text}" for name in dict.fromkeys((pair.metric, THROUGHPUT)) if (text := _line(pair, name))]
        if about is not None and about.claim:
            told.append(f"  claimed: {about.claim}")
    return told


def _line(pair: Pair, metric: str) -> str:
    ratio, about = pair.ratio(metric), METRICS[metric]
    if ratio is None:
        return ""
    on, off = (_shown(row.metrics[metric], about.unit) for row in (pair.on, pair.off))
    text = f"{metric}: {on} on, {off} off, {ratio.ratio:.2f}"
    if metric in pair.on.samples:
        text += f" [{ratio.interval.low:.2f}, {ratio.interval.high:.2f}]"
        text += "" if ratio.significant else ", may be chance"
    return text + {"lower": " (less is better)"}.get(about.better, "")


def _shown(value: float, unit: str) -> str:
    if unit == "B":
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:,.3g} {unit}".rstrip() if abs(value) < 1000 else f"{value:,.0f} {unit}".rstrip()
