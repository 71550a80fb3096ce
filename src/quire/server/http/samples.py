"""The history of a server as samples of each model, and what grew, held or was usual over some of its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from quire.server.http.history import History


@dataclass(frozen=True)
class Sample:
    """What /metrics said of one model at `at` (monotonic seconds); counters count since the start."""

    at: float
    healthy: bool = True
    in_flight: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    kv: float = 0.0
    grammars: float = 0.0
    preemptions: float = 0.0
    restarts: float = 0.0
    looked: float = 0.0
    found: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    tokens: float = 0.0
    ended: float = 0.0
    errors: float = 0.0


FIELDS = {
    "quire:requests_in_flight": "in_flight",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv",
    "vllm:num_preemptions_total": "preemptions",
    "quire:engine_restarts_total": "restarts",
    "vllm:prefix_cache_queries_total": "looked",
    "vllm:prefix_cache_hits_total": "found",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:generation_tokens_total": "tokens",
    "vllm:request_success_total": "ended",
}
"""Which metric each field of a `Sample` is."""


class Samples:
    """The samples of one model, oldest first; there is at least one."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.all = samples
        self.last = samples[-1]

    def between(self, older: float, newer: float = 0.0) -> list[Sample]:
        """Samples that are between `older` and `newer` seconds old."""
        now = self.last.at
        return [each for each in self.all if newer <= now - each.at <= older]

    def mean(self, name: str, older: float, newer: float = 0.0) -> float:
        """The mean of a gauge over that time; 0 where there are no samples."""
        values: list[float] = [getattr(each, name) for each in self.between(older, newer)]
        return sum(values) / len(values) if values else 0.0

    def grown(self, name: str, older: float, newer: float = 0.0) -> float:
        """Growth of a counter between two ages in seconds; a model that was loaded anew counts from 0."""
        values: list[float] = [getattr(each, name) for each in self.between(older, newer)]
        return sum(max(0.0, after - before) for before, after in pairwise(values))

    def since(self, holds: Callable[[Sample], bool]) -> float:
        """Seconds for which `holds` was true without a break, up to now; 0 where it is not true now."""
        found = 0.0
        for each in reversed(self.all):
            if not holds(each):
                break
            found = self.last.at - each.at
        return found

    def ago(self, name: str) -> float:
        """Seconds since a counter grew last."""
        for before, after in zip(reversed(self.all[:-1]), reversed(self.all), strict=False):
            if getattr(after, name) > getattr(before, name):
                return self.last.at - after.at
        return 0.0


def samples_of(history: History) -> dict[str, Samples]:
    """The samples of each model in a history; those of an unloaded model end with it, and say nothing any more."""
    places: dict[str, list[tuple[int, str]]] = {}
    grammars = -1
    for (name, labels), place in history.series.items():
        facts = dict(labels)
        if name == "quire:grammars_waiting":
            grammars = place
        elif name == "quire:engine_healthy":
            places.setdefault(facts.get("model_name", ""), []).append((place, "healthy"))
        elif name in FIELDS:
            own = places.setdefault(facts.get("model_name", ""), [])
            own.append((place, FIELDS[name]))
            if facts.get("finished_reason") == "error":
                own.append((place, "errors"))
    found = {}
    for model, wanted in places.items():
        samples = [
            sample for at, values in history.moments if (sample := _sample(at, values, wanted, grammars)) is not None
        ]
        if samples and samples[-1].at == history.moments[-1][0]:
            found[model] = Samples(samples)
    return found


def _sample(
    at: float, values: Sequence[float | None], wanted: Sequence[tuple[int, str]], grammars: int
) -> Sample | None:
    """One moment of a model; None where it was not loaded."""
    sums: dict[str, float] = {}
    for place, field in wanted:
        value = values[place] if place < len(values) else None
        if value is not None:
            sums[field] = sums.get(field, 0.0) + value
    if not sums:
        return None
    if not sums.get("in_flight", 1.0):  # gauges are of the last step, and count those that have left since
        sums.update(running=0.0, waiting=0.0, kv=0.0)
    healthy = sums.pop("healthy", 1.0) > 0
    reading = values[grammars] if 0 <= grammars < len(values) else None
    return Sample(at, healthy=healthy, grammars=reading or 0.0, **sums)
