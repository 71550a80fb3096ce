"""Several engines behind one edge: requests of one that dies go on in another, bit for bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from quire.core.errors import EngineFailure
from quire.engine.client import EngineKilled
from quire.engine.processes.supervisor import RestartPolicy, SupervisedEngine
from replica_edge import Edge
from supervised_engines import request


def test_replicas_share_the_requests() -> None:
    edge = Edge()
    edge.submit(*(request(f"r{i}", n=1 + i % 3) for i in range(30)))
    end = time.monotonic() + 30
    while time.monotonic() < end and not all(each[0]._stats.steps for each in edge.engines):
        edge.poll()
    assert all(each[0]._stats.steps for each in edge.engines)
    edge.finish()


def test_requests_of_a_dead_one_go_on_elsewhere_before_it_is_back() -> None:
    edge = Edge(end=EngineKilled, pause=30.0)
    edge.submit(*(request(f"r{i}", 40, n=1 + i % 2) for i in range(12)))
    edge.poll(20)
    edge.engines[1][0].dead = True
    edge.finish()
    assert len(edge.engines[1]) == 1, "nobody waited for the replica that is started again"


def test_a_replica_that_died_too_often_is_left_out_and_the_last_ends_it_all() -> None:
    edge = Edge(RestartPolicy(deaths=1), end=EngineKilled)
    edge.submit(*(request(f"r{i}", 30) for i in range(9)))
    edge.poll(10)
    edge.engines[0][0].dead = True
    edge.finish()
    assert len(edge.engines[0]) == 1
    edge = Edge(RestartPolicy(deaths=1), end=EngineKilled)
    for engines in edge.engines:
        engines[0].dead = True
    with pytest.raises(EngineFailure, match="the stub died"):
        edge.poll(100)
    edge.client.close()


def test_all_are_started_anew_one_after_the_other_under_load() -> None:
    edge = Edge(RestartPolicy(deaths=1), pause=0.1)
    for i in range(20):
        edge.submit(request(f"early {i}", 200, n=1 + i % 2))
    edge.poll(30)
    edge.client.restart()
    edge.client.restart()  # it is under way
    late = 0
    while not all(len(engines) == 2 for engines in edge.engines):
        assert sum(len(engines) == 2 or not replica.renewing for engines, replica in
                   zip(edge.engines, edge.client._replicas, strict=True)) >= 2, "one at a time"  # fmt: skip
        edge.submit(request(f"late {(late := late + 1)}", 20))
        edge.poll(5)
    edge.finish()
    assert [engines[0].closed for engines in edge.engines] == [1, 1, 1]


def test_what_came_of_earlier_engines_is_counted_across_replicas() -> None:
    edge = Edge(end=EngineKilled)
    edge.engines[1][0].dead = True
    while len(edge.engines[1]) < 2:
        edge.poll()
    edge.submit(*(request(f"r{i}", 100) for i in range(9)))
    edge.poll(20)
    edge.engines[1][-1].dead = True
    edge.finish()
    assert set(edge.restarts.values()) == {0, 1}


def test_a_change_of_adapters_is_told_once_with_the_first_error() -> None:
    edge = Edge()
    edge.client.change_adapter("a", "folder")
    edge.client.change_adapter("b", "bad")
    while len(edge.changes) < 2:
        edge.poll()
    assert sorted(edge.changes) == [("a", ""), ("b", "bad")]
    edge.finish()


def until(edge: Edge, there: Callable[[], bool]) -> None:
    """Poll until something is so."""
    end = time.monotonic() + 60
    while not there():
        assert time.monotonic() < end
        edge.poll()


@pytest.mark.parametrize("folder", ["folder", "bad"])
def test_a_change_of_adapters_does_not_wait_for_a_replica_that_is_gone(folder: str) -> None:
    edge = Edge(RestartPolicy(deaths=1), end=EngineKilled)
    lost = edge.engines[1][0]
    lost.change_adapter = lambda name, folder: None  # type: ignore[method-assign]
    edge.client.change_adapter("a", folder)
    edge.poll(50)
    assert not edge.changes
    lost.dead = True
    until(edge, lambda: bool(edge.changes))
    assert edge.changes == [("a", "bad" if folder == "bad" else "")]
    edge.finish()


def test_one_that_is_being_started_goes_on_with_the_requests_of_the_last_other() -> None:
    edge = Edge(RestartPolicy(deaths=1), pause=0.5, end=EngineKilled)
    edge.engines[2][0].dead = True
    edge.poll(50)
    starting = edge.client._replicas[1]
    edge.submit(*(request(f"r{i}", 60) for i in range(6)))
    starting.restart()
    until(edge, lambda: not starting.ready)
    edge.engines[0][0].dead = True
    until(edge, lambda: not edge.client.ready)
    edge.submit(request("late", 10))
    edge.finish()
    assert [len(each) for each in edge.engines] == [1, 2, 1]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_dies_nothing_is_lost_and_nothing_comes_twice(seed: int) -> None:
    rng, edge = random.Random(seed), Edge(end=EngineKilled)
    for i in range(40):
        edge.submit(request(f"{seed} {i}", rng.randint(1, 30), n=rng.choice((1, 1, 2))))
        edge.poll(rng.randrange(3))
        if rng.random() < 0.2:
            edge.engines[rng.randrange(3)][-1].dead = True
        paused = [name for name in edge.live if rng.random() < 0.1 and edge.client.pause(name)]
        edge.poll(rng.randrange(2))
        for name in paused:
            edge.client.resume(name)
        if rng.random() < 0.15:
            gone = rng.choice([*edge.live])
            edge.client.abort(gone)
            if any((gone, k) not in edge.ends for k in range(edge.live[gone].params.n)):
                for key in [key for key in edge.ends if key[0] == gone]:
                    del edge.ends[key]
            del edge.live[gone]
            edge.ends = {key: end for key, end in edge.ends.items() if key[0] != gone}
    edge.finish()


def test_nobody_reads_an_engine_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    edge, late = Edge(), list[object]()
    poll, close = SupervisedEngine.poll, SupervisedEngine.close
    closed: set[int] = set()

    def watched(engine: SupervisedEngine, timeout: float) -> Any:
        found = poll(engine, timeout)
        late.extend([engine] * (id(engine) in closed))
        return found

    def closing(engine: SupervisedEngine) -> None:
        closed.add(id(engine))
        close(engine)

    monkeypatch.setattr(SupervisedEngine, "poll", watched)
    monkeypatch.setattr(SupervisedEngine, "close", closing)
    edge.submit(request("a", 50))
    edge.poll(3)
    edge.client.close()
    time.sleep(0.3)
    assert closed and not late
