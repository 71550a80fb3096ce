"""How each statistic adds over replicas, and over the engines that one after the other had a place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.engine.client import EngineInfo, EngineKilled, StepReport
from quire.engine.processes.supervisor import SupervisedEngine
from quire.engine.stat_field import Adding, PrometheusMetric, annotated, over_replicas
from quire.engine.stats import ReplicaStats, Stats, StoreStats
from supervised_engines import FOREVER, LIMITS, Engine, request

SUMS = ("running", "waiting", "used_blocks", "total_blocks", "cached_blocks", "step_tokens", "restarts")
TOTALS = ("steps", "prompt_tokens", "generation_tokens", "preemptions", "prefix_queries", "prefix_hits",
          "image_queries", "image_hits", "numeric_errors", "drafts", "draft_tokens", "accepted_tokens")  # fmt: skip
FIRST = {
    **{name: 10 + i for i, name in enumerate(SUMS + TOTALS)},
    "waste": 0.5, "step_seconds": 0.2, "accepted_per_pos": (4, 1), "expert_pairs": (30, 10), "expert_imbalance": 1.5,
    "running_adapters": ("b", "a"), "waiting_adapters": (), "bubbles": (0.1, 0.2),
    "kv_store": StoreStats(blocks=5, bytes=50, written=3, hits=2, misses=1, bad=1, dropped=4),
}  # fmt: skip
SECOND = {
    **{name: 100 + i for i, name in enumerate(SUMS + TOTALS)},
    "waste": 0.1, "step_seconds": 0.3, "accepted_per_pos": (1, 1, 1), "expert_pairs": (40, 20),
    "expert_imbalance": 1.25, "running_adapters": ("c", "a"), "waiting_adapters": ("d",), "bubbles": (0.3,),
    "kv_store": StoreStats(blocks=6, bytes=60, written=10, hits=10, misses=10, bad=10, dropped=10),
}  # fmt: skip
STORES = {"written": 13, "hits": 12, "misses": 11, "bad": 11, "dropped": 14}
SIDE_BY_SIDE = {
    **{name: 110 + 2 * i for i, name in enumerate(SUMS + TOTALS)},
    "waste": 0.3, "step_seconds": 0.3, "accepted_per_pos": (5, 2, 1), "expert_pairs": (30, 10, 40, 20),
    "expert_imbalance": 1.35, "running_adapters": ("a", "b", "c"), "waiting_adapters": ("d",),
    "bubbles": (0.1, 0.2, 0.3), "kv_store": StoreStats(blocks=6, bytes=60, **STORES),
}  # fmt: skip
ONE_AFTER_THE_OTHER = {
    **SECOND,
    **{name: 110 + 2 * i for i, name in enumerate(SUMS + TOTALS) if name in TOTALS},
    "restarts": 1, "accepted_per_pos": (5, 2, 1), "expert_pairs": (70, 30), "expert_imbalance": 1.35,
    "kv_store": StoreStats(blocks=6, bytes=60, **STORES),
}  # fmt: skip
EVERY = [name for name in Stats.__struct_fields__ if name != "replicas"]


@pytest.mark.parametrize("name", EVERY)
def test_over_replicas(name: str) -> None:
    found = getattr(over_replicas([Stats(**FIRST), Stats(**SECOND)]), name)
    assert found == (pytest.approx(SIDE_BY_SIDE[name]) if isinstance(found, float) else SIDE_BY_SIDE[name])


class Said(Engine):
    """An engine that says certain statistics."""

    said: Stats

    def poll(self, timeout: float) -> StepReport | None:
        """A step with them."""
        report = super().poll(timeout)
        return report and msgspec.structs.replace(report, stats=self.said)


def two_lives() -> tuple[Stats, Stats, Stats]:
    """(After the first engine's step, when the second is there, after its step) of a supervised engine."""
    engines: list[Said] = []

    def start(*_: Any) -> Said:
        engines.append(Said({}, EngineKilled))
        engines[-1].said = Stats(**(SECOND if engines[1:] else FIRST))
        return engines[-1]

    client = SupervisedEngine(start, FOREVER, LIMITS)
    client.submit(request("a", 8))
    found = []
    for dies in (False, True, False):
        engines[-1].dead = dies
        report = client.poll(0.01)
        assert report is not None
        found.append(report.stats)
    client.close()
    return found[0], found[1], found[2]


@pytest.mark.parametrize("name", EVERY)
def test_over_lives(name: str) -> None:
    found = getattr(two_lives()[2], name)
    wanted = ONE_AFTER_THE_OTHER[name]
    assert found == (pytest.approx(wanted) if isinstance(found, float) else wanted)


def test_an_engine_that_is_gone_has_totals_and_no_gauges() -> None:
    first, between, _ = two_lives()
    assert between.waiting == 1 and between.restarts == 1 and between.total_blocks == first.total_blocks
    for name in ("running", "used_blocks", "cached_blocks", "step_tokens", "waste", "running_adapters", "bubbles"):
        assert not getattr(between, name), name
    for name in (*TOTALS, "accepted_per_pos", "expert_pairs", "expert_imbalance", "kv_store"):
        assert getattr(between, name) == getattr(first, name), name


def test_no_statistic_is_without_a_rule() -> None:
    assert set(SIDE_BY_SIDE) == set(EVERY) and set(STORES) | {"blocks", "bytes"} == set(StoreStats.__struct_fields__)
    assert set(ReplicaStats.__struct_fields__) - {"up"} <= set(EVERY)
    for kind in (Stats, StoreStats):
        assert set(annotated(kind, Adding)) == set(kind.__struct_fields__)


def test_what_metrics_need_there_is() -> None:
    known = {*Stats.__struct_fields__, *EngineInfo.__struct_fields__}
    assert {metric.needs for metric in annotated(Stats, PrometheusMetric).values()} <= {"", *known}


def test_numbers_are_those_of_all() -> None:
    ones = Stats(running=2, steps=3, waste=0.5, accepted_per_pos=(4, 1)), Stats(running=1, steps=4, waste=0.1)
    both = over_replicas(ones)
    assert (both.running, both.steps, both.accepted_per_pos) == (3, 7, (4, 1)) and both.waste == pytest.approx(0.3)
