"""The search for the knee, on servers that are formulas: so many requests a second, so many at a time."""

from __future__ import annotations

import asyncio
import heapq
import math
from typing import Any

import pytest

from quire.bench.arrivals import due_times
from quire.bench.loads import ServeLoad
from quire.bench.records import Record
from quire.bench.serving import Server, ServingResult, targets_of
from quire.bench.sessions import Workload
from quire.bench.sweep import MOST_POINTS, Sweep, SweepPoint, check, search, speed
from quire.core.errors import ConfigError

SERVER = Server("m", "pretended", "", False, 0, True)


class Pretended:
    """Answers `slots` requests at a time, each in `seconds`; all of the loads it got. `broken`: from that rate on."""

    def __init__(self, slots: int, seconds: float, broken: float = math.inf) -> None:
        self.slots, self.seconds, self.broken = slots, seconds, broken
        self.loads: list[ServeLoad] = []

    async def measure(self, load: ServeLoad, warm: bool) -> ServingResult:
        self.loads.append(load)
        bound = min(self.slots, load.max_concurrency or self.slots)
        free, records = [0.0] * bound, []
        for due in due_times(load, load.num_prompts):
            start = max(due, free[0])
            end = start + self.seconds
            heapq.heapreplace(free, end)
            sent = start if load.max_concurrency else due
            records.append(Record(due, sent, [end - self.seconds / 2, end], 4, 2, ready=sent))
            if self.broken <= load.request_rate < math.inf:
                records[-1].error = "no"
        targets = targets_of(load.goodput)
        return ServingResult(load, SERVER, Workload([], [], "poisson"), records, max(free), targets)

    def sweep(self, **options: Any) -> Sweep:
        points: list[SweepPoint] = []
        found = asyncio.run(search(ServeLoad(**options), self.measure, points.append))
        assert sorted(points, key=lambda point: point.at) == found.points and len(points) <= MOST_POINTS
        return found


@pytest.mark.parametrize("start", [math.inf, 3.0, 300.0])
def test_the_rate_is_raised_until_the_server_falls_behind(start: float) -> None:
    """8 at a time of 0.1 s each: 80 a second. The knee is where answers keep to 95 % of what is offered."""
    server = Pretended(8, 0.1)
    found = server.sweep(sweep="rate", request_rate=start, sweep_seconds=20.0, arrivals="constant")
    assert found.knee is not None and found.bounded
    assert 75 < found.knee.at <= 80 / 0.95 + 0.1
    missed = min(point.at for point in found.points if not point.held)
    assert found.knee.at < missed <= found.knee.at * 1.051
    assert len({load.seed for load in server.loads}) >= len(found.points), "no prompt is sent twice"


def test_targets_end_a_sweep_before_throughput_does() -> None:
    """Poisson arrivals wait for each other long before the server is full."""
    free = Pretended(1, 0.01).sweep(sweep="rate", sweep_seconds=15.0)
    bound = Pretended(1, 0.01).sweep(sweep="rate", sweep_seconds=15.0, goodput=("e2e:30",), attainment=0.9)
    assert free.knee is not None and bound.knee is not None
    assert bound.knee.at < 0.8 * free.knee.at
    assert any("met the targets" in point.why for point in bound.points)
    told = bound.results()
    assert told["knee"] == {"rate": bound.knee.at, "bounded": True}
    assert told["rates"]["completed"] == len(bound.knee.measured.records)
    assert [line["rate"] for line in told["sweep"]] == [point.at for point in bound.points]


@pytest.mark.parametrize("slots", [1, 6, 21])
def test_the_concurrency_is_raised_until_it_brings_nothing(slots: int) -> None:
    found = Pretended(slots, 0.1).sweep(sweep="concurrency", sweep_seconds=10.0)
    assert found.knee is not None and found.bounded
    assert 0.8 * slots <= found.knee.at <= 1.2 * slots + 1, "a step that brings nothing is not held"
    assert all(point.measured.load.max_concurrency == point.at for point in found.points)


def test_a_server_that_holds_nothing_has_no_knee() -> None:
    found = Pretended(1, 0.01).sweep(sweep="rate", request_rate=50.0, goodput=("ttft:1",), sweep_seconds=2.0)
    assert found.knee is None and found.results()["knee"]["rate"] is None
    broken = Pretended(100, 0.01, broken=30.0).sweep(sweep="rate", request_rate=8.0, sweep_seconds=2.0)
    assert broken.knee is not None and 8 <= broken.knee.at < 30
    assert any(point.why.endswith("failed") for point in broken.points)


def test_speed_forgets_the_ends() -> None:
    assert speed([float(i) for i in range(101)]) == pytest.approx(1.0)
    assert speed([*(float(i) for i in range(100)), 1e6]) == pytest.approx(1.0)
    assert speed([]) == speed([1.0]) == 0.0 and speed([1.0, 1.0]) == math.inf


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sweep": "tokens"}, "known are rate, concurrency"),
        ({"sweep": "rate", "arrivals": "closed"}, "have no rate"),
        ({"sweep": "rate", "arrivals": "trace", "trace": "x"}, "have no rate"),
        ({"sweep": "rate", "ramp_up_end_rps": 2.0}, "leave --ramp-up-start-rps"),
        ({"sweep": "concurrency", "request_rate": 2.0}, "arrivals are closed"),
        ({"sweep": "concurrency", "arrivals": "poisson"}, "arrivals are closed"),
    ],
)
def test_loads_that_cannot_be_swept_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(ServeLoad(**options))
