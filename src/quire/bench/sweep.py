"""Raise the rate, or the concurrency, until throughput no longer follows or targets are missed; bisect the knee.

Throughput follows a rate while requests are answered as fast as they come: between the tenth and the ninetieth
hundredth of each, so that neither the first answer's wait nor the last one's counts. It follows a concurrency while
it grows at least as the root of that: twice as many at a time must bring 1.41 times as much. Attainment as in
DistServe (Zhong et al., OSDI 2024): a load is held while that share of requests meets every target.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from quire.bench.loads import ServeLoad
from quire.bench.records import attainment
from quire.bench.serving import ServingResult, measure
from quire.core.errors import ConfigError
from quire.core.options.values import check_values

FOLLOWS = 0.95
"""Answered beside offered rate: what a load of hundreds of requests can tell from 1."""
FINE = 1.05
"""Rates this close need none between them; concurrencies are whole."""
LEAST = 20
MOST_POINTS = 24
OVER = 1 << 14
"""Requests per second, or at a time, beyond which one client tells little."""

Measure = Callable[[ServeLoad, bool], Awaitable[ServingResult]]


@dataclass(frozen=True)
class SweepPoint:
    """One load of a sweep: `at` requests per second, or at a time. `why`: it was not held; "" where it was."""

    at: float
    measured: ServingResult
    offered: float
    answered: float
    why: str

    @property
    def held(self) -> bool:
        """Whether throughput followed and targets were met."""
        return not self.why


@dataclass(frozen=True)
class Sweep:
    """Points in order of load. `knee`: the largest that was held; None where not even the least was.

    `bounded`: a load that was not held was found above it; else the sweep ended for want of points.
    """

    kind: str
    points: list[SweepPoint]
    knee: SweepPoint | None
    bounded: bool

    def results(self) -> dict[str, Any]:
        """Results for the report: the knee's figures, and a line for each point."""
        shown = self.knee or self.points[0]
        lines = [
            {
                self.kind: point.at,
                "offered_per_s": point.offered,
                "answered_per_s": point.answered,
                "held": point.held,
                "why": point.why,
                **_of(point.measured),
            }
            for point in self.points
        ]
        knee = self.knee.at if self.knee else None
        return shown.measured.results() | {"sweep": lines, "knee": {self.kind: knee, "bounded": self.bounded}}


def _of(measured: ServingResult) -> dict[str, float | None]:
    found = measured.metrics()
    names = ("output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "e2e_ms_p99", "goodput_per_s")
    return {name: found[name] for name in names if name in found}


def speed(times: Sequence[float]) -> float:
    """Events per second between the tenth and the ninetieth hundredth of them; 0 of none, inf where all are one."""
    if len(times) < 2:
        return 0.0
    ordered = np.sort(np.asarray(times, dtype=float))
    low, high = int(0.1 * (len(ordered) - 1)), math.ceil(0.9 * (len(ordered) - 1))
    took = float(ordered[high] - ordered[low])
    return (high - low) / took if took > 0 else math.inf


def judged(at: float, measured: ServingResult, before: SweepPoint | None) -> SweepPoint:
    """A load beside the one that was last held (None: the first)."""
    load, records = measured.load, measured.records
    answered = speed([r.chunks[-1] for r in records if r.ok])
    offered = speed([r.intended for r in records]) if load.sweep == "rate" else 0.0
    failed = sum(not r.ok for r in records)
    share = attainment(records, measured.targets) / max(1, len(records))
    why = ""
    if failed:
        why = f"{failed} requests failed"
    elif measured.targets and share < load.attainment:
        why = f"{share:.0%} of requests met the targets"
    elif load.sweep == "rate" and answered < FOLLOWS * offered:
        why = f"{answered:.2f} requests/s were answered of {offered:.2f}"
    elif before is not None and load.sweep == "concurrency":
        needed = before.answered * math.sqrt(at / before.at)
        if answered < needed:
            why = f"{answered:.2f} requests/s after {before.answered:.2f} at {before.at:g}"
    return SweepPoint(at, measured, offered, answered, why)


async def sweep(load: ServeLoad, on_point: Callable[[SweepPoint], None] = lambda _: None) -> Sweep:
    """All loads until the knee is found. `ConfigError` for a load that cannot be swept."""
    return await search(load, _measured, on_point)


async def _measured(load: ServeLoad, warm: bool) -> ServingResult:
    return await measure(load, warm=warm)


async def search(load: ServeLoad, one: Measure, on_point: Callable[[SweepPoint], None]) -> Sweep:
    """Search the highest load, where `one` measures a load."""
    check(load)
    return await _Search(load, one, on_point).go()


def check(load: ServeLoad) -> None:
    """`ConfigError` where a sweep's loads would not be what `load` says."""
    check_values(load)
    if load.arrivals in ("at-once", "closed", "trace", "ramp") and load.sweep == "rate":
        raise ConfigError(
            f"--sweep rate: arrivals {load.arrivals} have no rate to raise; name poisson, constant or gamma"
        )
    if load.sweep == "concurrency" and (load.arrivals not in ("", "closed") or not math.isinf(load.request_rate)):
        raise ConfigError("--sweep concurrency: arrivals are closed, and have no rate")
    if load.ramp_up_start_rps or load.ramp_up_end_rps:
        raise ConfigError("--sweep: raises rates by itself; leave --ramp-up-start-rps and --ramp-up-end-rps out")


class _Search:
    """Doubling from a load that is held, or halving to one, then bisection."""

    def __init__(self, load: ServeLoad, one: Measure, on_point: Callable[[SweepPoint], None]) -> None:
        self._load, self._one, self._on_point = load, one, on_point
        self._points: list[SweepPoint] = []
        self._whole = load.sweep == "concurrency"
        self._pace = 0.0  # requests per second, about

    async def go(self) -> Sweep:
        """The whole search."""
        held, missed = None, None
        at = await self._start()
        while len(self._points) < MOST_POINTS and at <= OVER:
            point = await self._try(at, held)
            if point.held:
                held = point
            else:
                missed = point
            if held is None:
                if at <= self._least:
                    break
                at = max(at / 2, self._least) if not self._whole else max(1, int(at) // 2)
            elif missed is None:
                at = 2 * held.at
            elif (between := self._between(held.at, missed.at)) is not None:
                at = between
            else:
                break
        return Sweep(self._load.sweep, sorted(self._points, key=lambda point: point.at), held, missed is not None)

    def _between(self, low: float, high: float) -> float | None:
        """The middle of two loads, None where there is none worth measuring."""
        if self._whole:
            return (low + high) // 2 if high - low > max(1, (FINE - 1) * low) else None
        return math.sqrt(low * high) if high > FINE * low else None

    async def _start(self) -> float:
        """Where the search begins: what was asked for, else half of what one request after another makes."""
        if self._whole:
            self._least = 1.0
            return float(self._load.max_concurrency or 1)
        if not math.isinf(self._load.request_rate):
            self._least = self._load.request_rate / 64
            return self._load.request_rate
        alone = replace(
            self._load, sweep="", arrivals="closed", max_concurrency=1, num_prompts=3, turns="1", trace="",
            trace_layout="", trace_speed=1.0, length_scale=1.0,
        )  # fmt: skip
        found = await self._one(alone, True)
        if not any(r.ok for r in found.records):
            raise ConfigError(f"--sweep: the first requests failed: {[r.error for r in found.records][:1]}")
        rate = len(found.records) / found.seconds
        self._least = rate / 64
        return rate / 2

    async def _try(self, at: float, held: SweepPoint | None) -> SweepPoint:
        """One load of `sweep_seconds`, about, whose prompts no other load has."""
        pace = at if not self._whole else (self._pace * (at / held.at if held else 1.0) or 1.0)
        count = max(LEAST, math.ceil(pace * self._load.sweep_seconds), int(4 * at) if self._whole else 0)
        load = replace(self._load, num_prompts=count, seed=self._load.seed + 1000 * (len(self._points) + 1))
        if self._whole:
            load = replace(load, max_concurrency=int(at))
        else:
            load = replace(load, request_rate=at)
        measured = await self._one(load, not self._points)
        point = judged(at, measured, held)
        self._pace = point.answered if math.isfinite(point.answered) else 0.0
        self._points.append(point)
        self._on_point(point)
        return point
