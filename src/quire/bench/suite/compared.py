"""What each technique buys, on beside off, and quire beside other engines: ratios of rows from the same rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from quire.figures.metrics import METRICS
from quire.figures.schema import FigureRow
from quire.figures.statistics import Comparison, compare

THROUGHPUT = "output_tokens_per_s"
BESIDE = {
    "prefill_tokens_per_s": "prefill rate", "decode_tokens_per_s": "decode rate", THROUGHPUT: "throughput",
    "ttft_ms_p50": "TTFT", "tpot_ms_p50": "TPOT", "cpu_s": "processor time",
}  # fmt: skip
"""Metrics that engines are compared by, and what a line calls them."""


@dataclass(frozen=True)
class Pair:
    """One technique under one load: `ratio` of a metric, on / off."""

    on: FigureRow
    off: FigureRow

    @property
    def metric(self) -> str:
        """What the technique is for."""
        return self.on.improves or THROUGHPUT

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
        load = pair.on.load
        what = f"{load.batch} x {load.input_len:g} -> {load.output_len:g}"
        told.append(f"{pair.on.technique}: {pair.on.model.name}, {what}")
        told += [f"  {text}" for name in dict.fromkeys((pair.metric, THROUGHPUT)) if (text := _line(pair, name))]
        if pair.on.claim:
            told.append(f"  claimed: {pair.on.claim}")
    return told


def beside(rows: Sequence[FigureRow]) -> str:
    """A line of the ratios of the first row, quire's, to each other engine's in the same rounds; empty without any."""
    ours, *others = rows
    told = []
    for row in others if ours.metrics and not ours.technique else ():
        ratios = {shown: _ratio(ours, row, name) for name, shown in BESIDE.items()}
        parts = [f"{shown} {ratio.ratio:.2f}" for shown, ratio in ratios.items() if ratio is not None]
        told += [f"{ours.engine.name} / {row.engine.name}: {', '.join(parts)}"] if parts else []
    return "; ".join(told)


def _ratio(a: FigureRow, b: FigureRow, metric: str) -> Comparison | None:
    """Ratio of the rounds' medians, a / b; None where either has none."""
    ours, theirs = a.samples.get(metric), b.samples.get(metric)
    return compare(ours, theirs) if ours and theirs and any(theirs) else None


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
