"""The simulator is the scheduler: many steps at once are those steps, and nothing depends on where it runs."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from often import only_slow
from paths import SUPPORT
from quire.bench.records import milliseconds
from quire.cache.tiers import StoreSizes
from quire.plan.rates import PlannedChunk
from quire.run.kv_budget import StatePlan
from quire.simulate.cluster import Cluster
from quire.simulate.measures import Gaps
from quire.simulate.parallel_cells import run_cells
from quire.simulate.requests import RequestStream
from quire.simulate.scaling import Autoscale, fewest
from quire.simulate.simulate_options import SimulatedLoad
from quire.simulate.step_times import InterpolatedTimes
from quire.simulate.store import SimulatedLink
from quire.simulate.timeline import Design
from simulated_clusters import TIMES, found, run, setup


def answered(cluster: Cluster) -> int:
    return sum(len(each.seconds["e2e"]) for each in cluster.measures.tenants.values())


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # limits, load, design
    "few at a time": ({}, {"request_rate": 6.0}, {}),
    "a full batch": ({"max_num_seqs": 4}, {"request_rate": 30.0}, {}),
    "blocks lack": ({"blocks": 60, "max_num_seqs": 32}, {"request_rate": 60.0, "output_len": "20:200"}, {}),
    "shared prefixes": ({"blocks": 90}, {"request_rate": 20.0, "shared_prefix": 200, "prefixes": 3}, {}),
    "priorities": (
        {"max_num_seqs": 4, "scheduling_policy": "priority"},
        {"request_rate": 25.0, "tenant": ("a=1:1:0", "b=1:1:5")},
        {},
    ),
    "tenants": (
        {"max_num_seqs": 6, "scheduling_policy": "fair"},
        {"request_rate": 25.0, "tenant": ("a=3:1", "b=1:3")},
        {},
    ),
    "static batches": ({"static_batching": True, "max_num_seqs": 8}, {"request_rate": 20.0}, {}),
    "whole prompts": ({"enable_chunked_prefill": False}, {"request_rate": 15.0, "input_len": "100:900"}, {}),
    "chunks by time": ({"target_itl_ms": 15.0}, {"request_rate": 10.0, "input_len": "100:900"}, {}),
    "windows": ({"windows": (64, 0)}, {"request_rate": 8.0}, {}),
    "recurrent states": (
        {"states": StatePlan(20, 1 << 20, 64)},
        {"request_rate": 20.0, "shared_prefix": 200, "prefixes": 3},
        {},
    ),
    "states that are handed on": (
        {"states": StatePlan(40, 1 << 20, 64)},
        {"request_rate": 8.0, "input_len": "64:600"},
        {"prefill": 1, "replicas": 3, "link": SimulatedLink(StoreSizes(1 << 16, 1 << 20), 1e9, 0.002)},
    ),
    "deaths": ({"blocks": 100}, {"request_rate": 20.0}, {"mtbf": 4.0, "start": 1.5}),
    "clients that leave": ({"max_num_seqs": 4}, {"request_rate": 30.0}, {"patience": 1.0}),
    "apart": (
        {},
        {"request_rate": 8.0, "input_len": "64:600"},
        {"prefill": 1, "replicas": 3, "link": SimulatedLink(StoreSizes(1 << 20), 1e9, 0.002)},
    ),
    "as many as are needed": (
        {"max_num_seqs": 8},
        {"request_rate": 25.0},
        {"autoscale": Autoscale(low=1, high=4, every=1.0, down_after=2.0), "start": 1.0},
    ),
}


def test_few_slots_of_states_find_less_of_prompts_that_begin_alike() -> None:
    load = SimulatedLoad(num_prompts=150, request_rate=20.0, shared_prefix=400, prefixes=12, input_len="8:60", seed=3)

    def hits(states: StatePlan) -> int:
        made = run(Design(setup=setup(blocks=4000, states=states, max_num_seqs=4), times=TIMES, replicas=1), load)
        return sum(hit for _, hit in (replica.lookups for replica in made.replicas))

    none, many, few = (hits(states) for states in (StatePlan(), StatePlan(400, 1, 64), StatePlan(18, 1, 64)))
    assert none > many > few > 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("seed", "name"), [*((0, name) for name in CASES), *(only_slow((1, name)) for name in CASES)])
def test_many_steps_at_once_are_those_steps(name: str, seed: int) -> None:
    limits, load, design = CASES[name]
    asked = SimulatedLoad(**({"num_prompts": 100, "input_len": "8:400", "output_len": "1:80", "seed": seed} | load))
    one, many = (
        run(
            Design(**{"setup": setup(fast=fast, **limits), "times": TIMES, "replicas": 2, "seed": seed} | design), asked
        )
        for fast in (False, True)
    )
    assert found(one) == found(many)
    failed = sum(each.failed.total() for each in many.measures.tenants.values())
    assert answered(many) + failed == 100 and (not failed or name == "clients that leave")
    assert name != "blocks lack" or sum(replica.preemptions for replica in many.replicas) > 0
    assert name != "deaths" or (many.deaths > 0 and many.moved > 0)
    assert name != "apart" or (many.moved > 50 and many.store is not None and many.store.read_blocks > 50)
    assert name != "as many as are needed" or {point.replicas for point in many.measures.curve} > {1}


SCRIPT = """
import json, sys
from simulated_clusters import TIMES, found, run, setup
from quire.simulate.timeline import Design
from quire.simulate.simulate_options import SimulatedLoad
design = Design(setup=setup(), times=TIMES, replicas=5, mtbf=5.0, start=1.0, seed=3)
load = SimulatedLoad(num_prompts=150, request_rate=40.0, shared_prefix=64, prefixes=4, tenant=("a=1", "b=2"), seed=3)
print(json.dumps(found(run(design, load))))
assert "torch" not in sys.modules
"""


def test_the_same_in_every_process() -> None:
    """Whatever Python's hashes of strings are."""
    told = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT], env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(SUPPORT)},
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert told[0] == told[1] and json.loads(told[0])["ends"][1] > 0


def test_every_token_of_every_request_comes_whatever_dies() -> None:
    """Gaps are counted one by one: each request has as many as its tokens less the first."""
    design = Design(setup=setup(), times=TIMES, replicas=3, mtbf=3.0, start=2.0, seed=1)
    cluster = run(design, SimulatedLoad(num_prompts=200, request_rate=25.0, output_len="10:60", seed=1))
    [whole] = cluster.measures.tenants.values()
    assert cluster.deaths > 3 and answered(cluster) == 200
    assert sum(whole.gaps.counts.values()) == whole.output_tokens - 200


def test_one_request_alone_takes_its_steps() -> None:
    design = Design(setup=setup(max_num_batched_tokens=512), times=TIMES, edge_ms=3.0)
    cluster = run(design, SimulatedLoad(num_prompts=1, input_len="700", output_len="5"))
    [each] = cluster.measures.tenants.values()
    first = TIMES.seconds([PlannedChunk(512, 0)]) + TIMES.seconds([PlannedChunk(188, 512)])
    gaps = [TIMES.seconds([PlannedChunk(1, 700 + i)]) for i in range(4)]
    assert each.seconds["ttft"][0] == pytest.approx(first + 0.003, rel=1e-12)
    assert each.seconds["e2e"][0] == pytest.approx(first + 0.003 + sum(gaps), rel=1e-12)
    table = cluster.measures.results(cluster.last)["latency_ms"]
    assert table["itl"]["mean"] == pytest.approx(1e3 * sum(gaps) / 4, rel=5e-4)


def test_percentiles_of_counted_gaps_are_those_of_the_gaps() -> None:
    rng, gaps, plain = random.Random(0), Gaps(), list[float]()
    for _ in range(500):
        seconds, count = rng.lognormvariate(-4, 1), rng.randint(1, 9)
        gaps.add(seconds, count)
        plain += [seconds] * count
    told, exact = gaps.milliseconds(), milliseconds(plain)
    assert told is not None and exact is not None and told.keys() == exact.keys()
    assert all(told[name] == pytest.approx(exact[name], rel=6e-4) for name in exact)
    assert Gaps().milliseconds() is None


def test_more_than_may_wait_is_refused() -> None:
    design = Design(setup=setup(max_num_seqs=2, max_num_queued_reqs=10), times=TIMES)
    cluster = run(design, SimulatedLoad(num_prompts=50))
    assert cluster.measures.results(1.0)["failures"] == {"429": 40} and answered(cluster) == 10
    long = run(Design(setup=setup(), times=TIMES), SimulatedLoad(num_prompts=3, input_len="2500"))
    assert long.measures.results(1.0)["failures"] == {"too long": 3}


def test_the_fair_policy_serves_by_weight_and_first_come_does_not() -> None:
    means = {}
    for policy in ("fair", "fcfs"):
        limits = {"max_num_seqs": 4, "scheduling_policy": policy, "max_num_queued_reqs": 10_000}
        load = SimulatedLoad(num_prompts=300, request_rate=40.0, tenant=("flood=9", "quiet=1"), seed=2)
        cluster = run(Design(setup=setup(**limits), times=TIMES), load)
        means[policy] = float(np.mean(cluster.measures.tenants["quiet"].seconds["ttft"]))
    assert means["fair"] < 0.2 * means["fcfs"]


def test_prefixes_are_followed_by_the_engines_router_alone() -> None:
    shares = {}
    for router in ("prefix", "random", "round-robin", "least-requests", "two-choices"):
        load = SimulatedLoad(num_prompts=300, request_rate=20.0, shared_prefix=320, prefixes=16, input_len="16:32")
        cluster = run(Design(setup=setup(), times=TIMES, replicas=4, router=router), load)
        queries, hits = (sum(each) for each in zip(*(r.lookups for r in cluster.replicas), strict=True))
        shares[router] = hits / queries
    best = shares.pop("prefix")
    assert best > 1.1 * max(shares.values())


def test_decodes_between_two_that_were_asked_for_lie_on_a_line() -> None:
    lines = InterpolatedTimes(TIMES)
    chunks = [PlannedChunk(1, 100), PlannedChunk(1, 900), PlannedChunk(1, 41)]
    assert lines.seconds(chunks) == pytest.approx(TIMES.seconds(chunks), rel=1e-12)
    assert lines.decodes(3, 1041, 4)[2] == pytest.approx(TIMES.decodes(3, 1041, 4)[2], rel=1e-12)
    assert lines.seconds([PlannedChunk(90, 5)]) == TIMES.seconds([PlannedChunk(90, 5)]) and lines.seconds([]) == 0.0
    assert TIMES.decodes(3, 1041, 2) == [TIMES.seconds([PlannedChunk(1, c + i) for _, c in chunks]) for i in range(2)]


@pytest.mark.parametrize("least", [1, 2, 3, 7, 8, 30])
def test_the_fewest_that_hold_are_found(least: int) -> None:
    tried: list[int] = []
    assert fewest(lambda n: bool(tried.append(n)) or n >= least, 30) == least
    assert len(tried) == len(set(tried)) <= 10
    assert fewest(lambda n: False, 30) is None


def test_cells_are_clusters_by_themselves() -> None:
    """What two processes give is what the two loads give alone, put together."""
    load = SimulatedLoad(num_prompts=90, request_rate=20.0, shared_prefix=64, tenant=("a=1", "b=1"))
    design = Design(setup=setup(), times=TIMES, replicas=5, seed=7)
    whole = run_cells(design, RequestStream(load), {"ttft": 50.0}, 2, lambda: None)
    alone = []
    for at, asked in enumerate((list(RequestStream(load))[::2], list(RequestStream(load))[1::2])):
        alone.append(run_cells(replace(design, replicas=3 - at, seed=14 + at), asked, {"ttft": 50.0}, 1, list))
    assert whole.steps == sum(part.steps for part in alone) and whole.hits == sum(part.hits for part in alone) > 0
    told, seconds = whole.measures({"ttft": 50.0}).results(whole.last), max(part.last for part in alone)
    assert told["rates"]["completed"] == 90 and whole.last == seconds
    ttfts = [part.measures({}).of(name).seconds["ttft"] for part in alone for name in ("a", "b")]
    assert told["latency_ms"]["ttft"] == pytest.approx(milliseconds([s for some in ttfts for s in some]), rel=1e-12)
    assert whole.curve[0].replicas == 5 and len(whole.curve) == max(len(part.curve) for part in alone)
