"""What a simulation found, in the terms of a benchmark: latencies of requests, gaps between tokens, rates, a curve."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from quire.bench.records import milliseconds

BIN = 5e-4
"""Width of a bin of gaps, as a share of the gap: a million requests have 10^8 of them, and none is more exact."""
CURVE = 600
"""Points of the curve at most; then every second one is dropped."""
NAMES = ("ttft", "tpot", "e2e", "queue")


class Gaps:
    """Counts of gaps between tokens, in bins of equal ratio."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, seconds: float, count: int) -> None:
        """Add so many gaps of that length."""
        self.counts[int(math.log(max(seconds, 1e-9)) / BIN + 1e6)] += count

    def milliseconds(self) -> dict[str, float] | None:
        """Summarize in milliseconds: mean and percentiles, to within half a bin; None of nothing."""
        if not self.counts:
            return None
        bins = np.array(sorted(self.counts))
        values, weights = 1e3 * np.exp((bins + 0.5 - 1e6) * BIN), np.array([self.counts[int(b)] for b in bins])
        ends = np.cumsum(weights)

        def at(rank: float) -> float:
            low, share = int(rank), rank - int(rank)
            first, second = np.searchsorted(ends, [low, min(low + 1, int(ends[-1]) - 1)], side="right")
            return float(values[first] + share * (values[second] - values[first]))

        found = {f"p{q}": at(q / 100 * (int(ends[-1]) - 1)) for q in (50, 90, 95, 99)}
        mean = float((values * weights).sum() / ends[-1])
        return {"mean": mean, **found, "min": float(values[0]), "max": float(values[-1])}


class TenantFigures(msgspec.Struct):
    """What `Latencies` holds, to pass between processes: seconds as bytes of doubles."""

    gaps: dict[int, int]
    seconds: dict[str, bytes]
    failed: dict[str, int]
    tokens: tuple[int, int]
    good: int


class Latencies:
    """Latencies of the requests of one tenant: seconds, one of each name for each request that was answered."""

    def __init__(self) -> None:
        self.gaps = Gaps()
        self.seconds = {name: array("d") for name in NAMES}
        self.input_tokens = self.output_tokens = self.good = 0
        self.failed: Counter[str] = Counter()

    def figures(self) -> TenantFigures:
        """All figures of this tenant."""
        seconds = {name: found.tobytes() for name, found in self.seconds.items()}
        tokens = (self.input_tokens, self.output_tokens)
        return TenantFigures(dict(self.gaps.counts), seconds, dict(self.failed), tokens, self.good)

    def take(self, figures: TenantFigures) -> None:
        """Add the latencies of another cell."""
        self.gaps.counts.update(figures.gaps)
        for name, found in figures.seconds.items():
            self.seconds[name].frombytes(found)
        self.input_tokens += figures.tokens[0]
        self.output_tokens += figures.tokens[1]
        self.good += figures.good
        self.failed.update(figures.failed)

    def table(self) -> dict[str, dict[str, float] | None]:
        """Table in the order of reports."""
        found = {name: milliseconds(self.seconds[name]) for name in NAMES}
        return {"ttft": found["ttft"], "tpot": found["tpot"], "itl": self.gaps.milliseconds(), "e2e": found["e2e"],
                "queue": found["queue"]}  # fmt: skip

    def rates(self, seconds: float) -> dict[str, float]:
        """Rates by the names of `bench.records.rates`."""
        count, seconds = len(self.seconds["e2e"]), seconds or math.inf
        read, written = self.input_tokens, self.output_tokens
        return {
            "duration_s": seconds if count else 0.0, "completed": count, "failed": self.failed.total(),
            "input_tokens": read, "output_tokens": written, "requests_per_minute": 60 * count / seconds,
            "output_tokens_per_s": written / seconds, "total_tokens_per_s": (read + written) / seconds,
        }  # fmt: skip


class AnsweredRequest(NamedTuple):
    """Times of a request that was answered, as its client sees them."""

    due: float
    scheduled: float
    first: float
    last: float
    input_tokens: int
    output_tokens: int


class ClusterPoint(NamedTuple):
    """The cluster at one time; `kv`: share of the blocks in service that have an owner."""

    time: float
    replicas: int
    running: int
    waiting: int
    kv: float


class Measures:
    """Gathers while a simulation runs. `targets`: name -> milliseconds, what a good request meets."""

    def __init__(self, targets: Mapping[str, float]) -> None:
        self.targets = targets
        self.tenants: dict[str, Latencies] = {}
        self.curve: list[ClusterPoint] = []
        self.steps = self.rows = 0
        self.busy = 0.0
        self._keep = self._seen = 1

    def of(self, tenant: str) -> Latencies:
        """What is gathered of a tenant."""
        found = self.tenants.get(tenant)
        if found is None:
            found = self.tenants[tenant] = Latencies()
        return found

    def gaps(self, seconds: float, tenants: dict[str, int]) -> None:
        """Note that so many sequences of each tenant waited so long for a token after one."""
        for tenant, count in tenants.items():
            self.of(tenant).gaps.add(seconds, count)

    def stepped(self, steps: int, rows: int, seconds: float) -> None:
        """Note that so many steps computed so many rows in all, in so many seconds of one replica."""
        self.steps += steps
        self.rows += rows
        self.busy += seconds

    def ended(self, tenant: str, found: AnsweredRequest) -> None:
        """A request was answered."""
        into, ttft, e2e = self.of(tenant), found.first - found.due, found.last - found.due
        tpot = (e2e - ttft) / (found.output_tokens - 1) if found.output_tokens > 1 else 0.0
        seconds = into.seconds
        seconds["ttft"].append(ttft)
        seconds["e2e"].append(e2e)
        seconds["queue"].append(found.scheduled - found.due)
        if found.output_tokens > 1:
            seconds["tpot"].append(tpot)
        into.input_tokens += found.input_tokens
        into.output_tokens += found.output_tokens
        met = {"ttft": ttft, "tpot": tpot, "e2e": e2e}
        into.good += all(1e3 * met[name] <= limit for name, limit in self.targets.items())

    def failed(self, tenant: str, why: str) -> None:
        """A request was not: "429", "timeout", "too long"."""
        self.of(tenant).failed[why] += 1

    def sample(self, point: ClusterPoint) -> None:
        """Take one sample of equally many seconds."""
        self._seen += 1
        if self._seen % self._keep == 0:
            self.curve.append(point)
        if len(self.curve) > CURVE:
            self.curve, self._keep = self.curve[::2], 2 * self._keep

    def figures(self) -> dict[str, TenantFigures]:
        """Figures of each tenant."""
        return {name: each.figures() for name, each in self.tenants.items()}

    def merge(self, tenants: Mapping[str, TenantFigures]) -> None:
        """Add what another cell measured."""
        for name, figures in tenants.items():
            self.of(name).take(figures)

    def results(self, seconds: float) -> dict[str, Any]:
        """Results in the shape of `bench.serving`'s; more of each tenant where there are several."""
        whole = Latencies()
        for each in self.tenants.values():
            whole.take(each.figures())
        found: dict[str, Any] = {"rates": whole.rates(seconds), "latency_ms": whole.table()}
        if self.targets:
            asked = len(whole.seconds["e2e"]) + whole.failed.total()
            good = {
                "goodput_requests_per_s": whole.good / (seconds or math.inf),
                "attainment": whole.good / max(1, asked),
            }
            found["rates"] |= good
        if whole.failed:
            found["failures"] = dict(sorted(whole.failed.items()))
        if len(self.tenants) > 1:
            found["tenants"] = {
                name: {"rates": each.rates(seconds), "latency_ms": each.table(), "failures": dict(each.failed)}
                for name, each in sorted(self.tenants.items())
            }
        return found
