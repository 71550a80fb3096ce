"""What /metrics said over the last minutes, for a live page that is opened later: a few numbers every 5 seconds."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import pairwise

import msgspec
from prometheus_client import CollectorRegistry

EVERY_SECONDS = 5.0
MAX_MOMENTS = 180
"""Moments: a quarter of an hour."""
MOST_SERIES = 4096
MOST_TENANTS = 256
NAMES = frozenset({
    "process_start_time_seconds", "quire:requests_in_flight", "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc", "quire:kv_waste_ratio", "vllm:generation_tokens_total", "vllm:prompt_tokens_total",
    "vllm:request_success_total", "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total", "quire:engine_restarts_total", "quire:engine_steps_total",
    "quire:engine_healthy", "quire:grammars_waiting",
    "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
})  # fmt: skip
"""What the page's charts (live/readings.js) and what is said to be wrong (diagnosis.py) are made of."""
Key = tuple[str, tuple[tuple[str, str], ...]]


class PastSeries(msgspec.Struct, kw_only=True):
    """A sample of /metrics by its name and labels."""

    name: str
    labels: dict[str, str]


class PastMoment(msgspec.Struct, kw_only=True):
    """`ago`: seconds. `values` are in the order of the series; null: there was none, as those behind the last."""

    ago: float
    values: list[float | None]


class Past(msgspec.Struct, kw_only=True):
    """Response of /dashboard/history, oldest first."""

    series: list[PastSeries]
    moments: list[PastMoment]


@dataclass
class History:
    """Kept whether or not somebody looks; names and labels once, numbers for each moment. `tenants`: tokens of each
    since the start, of the `MOST_TENANTS` that had most."""

    series: dict[Key, int] = field(default_factory=dict)
    moments: deque[tuple[float, list[float | None]]] = field(default_factory=lambda: deque(maxlen=MAX_MOMENTS))
    tenants: deque[tuple[float, dict[str, int]]] = field(default_factory=lambda: deque(maxlen=MAX_MOMENTS))

    def note(
        self, registries: Iterable[CollectorRegistry], now: float, tenants: Mapping[str, int] | None = None
    ) -> None:
        """Keep what the registries say at `now`, a monotonic time, and the tokens of each tenant since the start."""
        found: dict[int, float] = {}
        for registry in registries:
            for family in registry.collect():
                for sample in family.samples:
                    if sample.name not in NAMES:
                        continue
                    key = (sample.name, tuple(sorted(sample.labels.items())))
                    if key in self.series or len(self.series) < MOST_SERIES:
                        found.setdefault(self.series.setdefault(key, len(self.series)), sample.value)
        self.moments.append((now, [found.get(place) for place in range(len(self.series))]))
        used = tenants or {}
        self.tenants.append((now, {name: used[name] for name in nlargest(MOST_TENANTS, used, key=used.__getitem__)}))

    def told(self, now: float) -> Past:
        """Whole history, for a page."""
        series = [PastSeries(name=name, labels=dict(labels)) for name, labels in self.series]
        return Past(series=series, moments=[PastMoment(ago=now - at, values=values) for at, values in self.moments])

    def rates(self, name: str, model: str, bins: int = 30) -> list[float | None]:
        """How fast a counter of a model grew, per second, in each of `bins` parts of the time that is kept, oldest
        first; None: nothing is known of it."""
        places = [at for (each, labels), at in self.series.items() if each == name and ("model_name", model) in labels]
        values = [
            (at, sum(found[place] or 0.0 for place in places if place < len(found))) for at, found in self.moments
        ]
        return binned(values, bins)

    def tenant_rates(self, tenant: str, bins: int = 30) -> list[float | None]:
        """Tokens per second of a tenant, as `rates`."""
        return binned([(at, float(used.get(tenant, 0))) for at, used in self.tenants], bins)

    async def keep(
        self, registries: Callable[[], list[CollectorRegistry]], tenants: Callable[[], Mapping[str, int]]
    ) -> None:
        """Note all of them every `EVERY_SECONDS`, until cancelled."""
        while True:
            self.note(registries(), time.monotonic(), tenants())
            await asyncio.sleep(EVERY_SECONDS)


def binned(values: Sequence[tuple[float, float]], bins: int) -> list[float | None]:
    """Growth per second of a counter, of which `values` are (seconds, count), over the last quarter of an hour in
    `bins` equal parts, oldest first; None for parts without a value."""
    found: list[float | None] = [None] * bins
    if not values:
        return found
    width = EVERY_SECONDS * MAX_MOMENTS / bins
    end = values[-1][0]
    for (before_at, before), (at, now) in pairwise(values):
        place = bins - 1 - int((end - at) / width)
        if place >= 0 and at > before_at:
            found[place] = (found[place] or 0.0) + max(0.0, now - before) / width
    return found
