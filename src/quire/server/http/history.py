"""What /metrics said over the last minutes, for a live page that is opened later: a few numbers every 5 seconds."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
from prometheus_client import CollectorRegistry

EVERY_SECONDS = 5.0
MAX_MOMENTS = 180
"""Moments: a quarter of an hour."""
MOST_SERIES = 4096
NAMES = frozenset({
    "process_start_time_seconds", "quire:requests_in_flight", "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc", "quire:kv_waste_ratio", "vllm:generation_tokens_total", "vllm:prompt_tokens_total",
    "vllm:request_success_total", "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total", "quire:engine_restarts_total", "quire:engine_steps_total",
    "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
})  # fmt: skip
"""What the page's charts are made of (live/readings.js)."""
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
    """Kept whether or not somebody looks; names and labels once, numbers for each moment."""

    series: dict[Key, int] = field(default_factory=dict)
    moments: deque[tuple[float, list[float | None]]] = field(default_factory=lambda: deque(maxlen=MAX_MOMENTS))

    def note(self, registries: Iterable[CollectorRegistry], now: float) -> None:
        """Keep what the registries say at `now`, a monotonic time."""
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

    def told(self, now: float) -> Past:
        """Whole history, for a page."""
        series = [PastSeries(name=name, labels=dict(labels)) for name, labels in self.series]
        return Past(series=series, moments=[PastMoment(ago=now - at, values=values) for at, values in self.moments])

    async def keep(self, registries: Callable[[], list[CollectorRegistry]]) -> None:
        """Note all of them every `EVERY_SECONDS`, until cancelled."""
        while True:
            self.note(registries(), time.monotonic())
            await asyncio.sleep(EVERY_SECONDS)
