"""Simulated clusters with fixed times of steps."""

from __future__ import annotations

from typing import Any

from quire.core.config import SchedulerConfig
from quire.run.kv_budget import NO_STATES, StatePlan
from quire.simulate.cluster import Cluster
from quire.simulate.replica import Setup
from quire.simulate.requests import RequestStream
from quire.simulate.simulate_options import SimulatedLoad
from quire.simulate.step_times import StepTable
from quire.simulate.timeline import Design

TIMES = StepTable(points=((1, 0.008), (64, 0.01), (512, 0.05)), per_key=2e-8, per_sequence=1e-5)


def setup(
    blocks: int = 400,
    fast: bool = True,
    windows: tuple[int, ...] = (0,),
    states: StatePlan = NO_STATES,
    **limits: Any,
) -> Setup:
    return Setup(SchedulerConfig(**limits), blocks, 16, 2048, windows=windows, states=states, fast=fast)


def found(cluster: Cluster) -> dict[str, Any]:
    """All that a run gave, to the last bit."""
    measures = cluster.measures
    return {
        "tenants": {
            name: ({n: list(s) for n, s in each.seconds.items()}, dict(each.gaps.counts), dict(each.failed))
            for name, each in measures.tenants.items()
        },
        "curve": measures.curve,
        "steps": (measures.steps, measures.rows),
        "preemptions": [replica.preemptions for replica in cluster.replicas],
        "lookups": [replica.lookups for replica in cluster.replicas],
        "ends": (cluster.last, cluster.deaths, cluster.moved, cluster.fleet.replica_seconds),
    }


def run(design: Design, load: SimulatedLoad) -> Cluster:
    cluster = Cluster(design, {"ttft": 200.0})
    cluster.run(RequestStream(load))
    for replica in cluster.replicas:
        replica.pool.check()
        assert not replica.pool.num_used and not replica.scheduler.requests
        if (states := replica.scheduler.tables.states) is not None:
            states.check()
            assert not states.held
    return cluster
