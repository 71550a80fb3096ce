"""Engines that die: every request goes on as if nothing had been, and one that kills gets an error."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from quire.core.errors import ConfigError, EngineFailure
from quire.core.request import Output
from quire.engine.client import EngineInfo, EngineKilled
from quire.engine.processes.supervisor import RestartPolicy
from quire.engine.processes.unfinished import UnfinishedRequest
from stub_engine import expected
from supervised_engines import Edge, Engine, request


def test_every_sequence_goes_on_where_it_stopped() -> None:
    edge = Edge(end=EngineKilled)
    edge.submit(request("a"), request("b", 12, n=3), request("c", 5, prompt_logprobs=1))
    for _ in range(4):
        edge.poll(3)
        edge.engine.dead = True
        edge.poll()
    edge.finish()
    edge.check()
    assert sum(output.prompt_logprobs is not None for output in edge.outputs) == 1
    assert len(edge.engines) == 5 and edge.client._stats.restarts == 4
    assert edge.limits == [None, *[edge.client.info] * 4], "the next has the limits of the one before"
    assert all(engine.closed == 1 for engine in edge.engines[:-1])
    made = sum(map(len, edge.tokens.values()))
    assert edge.client._stats.generation_tokens == made, "totals go on too"


def test_one_of_n_that_was_aborted_does_not_come_back() -> None:
    edge = Edge()
    edge.submit(request("r", 40, n=2))
    edge.poll(5)
    edge.client.abort("r", 1)
    assert edge.engine.running == 1
    edge.engine.dead = True
    edge.poll(3)
    assert len(edge.engines) == 2 and edge.engine.running == 1
    edge.poll(60)
    assert edge.ends == {("r", 0): "length"} and edge.tokens["r", 0] == expected(edge.live["r"])
    assert not edge.client._kept
    edge.submit(request("s", 40, n=2))
    edge.poll(2)
    for index in (0, 1):
        edge.client.abort("s", index)
    assert not edge.client._kept and edge.engine.running == 0


def test_times_of_a_sequence_are_those_of_its_client() -> None:
    edge = Edge()
    edge.submit(request("a"))
    edge.poll(2)
    edge.engine.dead = True
    edge.poll()
    after = time.monotonic()
    edge.finish()
    timing = edge.outputs[-1].timing
    assert timing is not None and timing.arrival <= timing.scheduled <= timing.first_token < after < timing.last_token
    first = next(output.timing for output in edge.outputs if output.timing is not None)
    assert (first.scheduled, first.first_token) == (timing.scheduled, timing.first_token)
    assert [output.restarts for output in edge.outputs[:2]] == [0, 0] and edge.outputs[-1].restarts == 1


def test_preemptions_of_all_engines_count() -> None:
    kept = UnfinishedRequest(request("a"))
    for engine, told in enumerate(((0, 1, 1), (0, 2), (1,))):
        kept.replay_request()
        for count in told:
            output = Output(request_id=kept.name, tokens=[9], preemptions=count)
            kept.take(output)
        assert output.preemptions == (1, 3, 4)[engine]


def test_one_that_kills_is_tried_alone_and_gets_an_error() -> None:
    for tokens in (0, 3):
        poison = request("poison")
        edge = Edge({poison.seed: tokens})
        others = [request(f"r{i}", 9, n=1 + i % 2) for i in range(15)]
        edge.submit(*others[:7], poison, *others[7:])
        edge.finish()
        edge.check("poison")
        assert edge.client._restarts == 2, "one death in the batch, one alone"


def test_whoever_is_killed_often_is_tried_alone_after_the_second_time() -> None:
    poison = request("poison")
    edge = Edge({poison.seed: 2}, end=EngineKilled)
    edge.submit(request("a"), poison, request("b"))
    edge.finish()
    edge.check("poison")
    assert edge.client._restarts == 4


def test_a_kill_from_outside_while_one_is_tried_does_not_harm_it() -> None:
    edge = Edge()
    edge.submit(request("a"), request("b"))
    edge.poll(2)
    edge.engine.dead = True
    edge.poll()
    assert edge.client._trial and edge.engine.running == 1
    edge.engine.end, edge.engine.dead = EngineKilled, True
    edge.poll()
    edge.finish()
    edge.check()


def test_what_comes_or_leaves_during_a_trial_is_served_or_forgotten() -> None:
    edge = Edge()
    edge.submit(request("a"), request("b"), request("c"))
    edge.poll(2)
    edge.engine.dead = True
    edge.poll()
    edge.submit(request("late"))
    assert edge.engine.running == 1
    for name in ("a", "b"):
        edge.client.abort(name)
        del edge.live[name]
    edge.finish()
    edge.check()
    assert edge.engine.running == 0


def test_too_many_deaths_end_it_with_the_reason() -> None:
    edge = Edge(patience=RestartPolicy(deaths=3))
    edge.submit(request("a", 90))
    for _ in range(2):
        edge.poll(4)
        edge.engine.dead = True
        edge.poll()
    edge.poll(4)
    edge.engine.dead = True
    with pytest.raises(EngineFailure, match="the stub died; that was death 3 within 600 s"):
        edge.poll()
    assert not edge.client.ready
    only = Edge(patience=RestartPolicy(deaths=1))
    only.engine.dead = True
    with pytest.raises(EngineFailure, match=r"^the stub died$"):
        only.poll()


def test_deaths_long_ago_do_not_count() -> None:
    edge = Edge(patience=RestartPolicy(deaths=2, window=0.02), end=EngineKilled)
    edge.submit(request("a"))
    for _ in range(4):
        edge.poll()
        edge.engine.dead = True
        time.sleep(0.03)
        edge.poll()
    edge.finish()
    edge.check()


def test_one_that_cannot_be_started_again_ends_it() -> None:
    edge = Edge()
    edge.submit(request("a"))
    start = edge.client._starting._start
    deaths = iter([EngineFailure("died while it loaded"), ConfigError("the folder is gone")])

    def failing(before: EngineInfo | None, given_up: Callable[[], bool]) -> Engine:
        raise next(deaths)

    edge.client._starting._start = failing  # type: ignore[assignment]
    edge.engine.dead = True
    with pytest.raises(EngineFailure, match="died while it loaded; it could not be started again: the folder is gone"):
        edge.poll()
    assert start is not failing


def test_an_engine_that_hangs_is_killed_and_replaced() -> None:
    edge = Edge(patience=RestartPolicy(hang=0.05, deaths=10))
    edge.submit(request("a", 40))
    edge.poll(3)
    hung = edge.engine
    hung.silent = True
    end = time.monotonic() + 5
    while edge.engine is hung:
        edge.poll()
        assert time.monotonic() < end
    assert hung.dead
    edge.finish()
    edge.check()


def test_an_idle_engine_and_one_in_its_first_step_do_not_hang() -> None:
    edge = Edge(patience=RestartPolicy(hang=0.02, deaths=10))
    edge.engine.silent = True
    for _ in range(60):
        edge.poll()
    edge.submit(request("a"))
    for _ in range(60):
        edge.poll()
    edge.engine.silent = False
    edge.finish()
    assert len(edge.engines) == 1


def test_adapters_that_were_loaded_are_loaded_again() -> None:
    edge = Edge()
    for name, folder in (("one", "/one"), ("two", "/two"), ("three", "bad"), ("one", "")):
        edge.client.change_adapter(name, folder)
        edge.poll()
    edge.submit(request("a"))
    edge.engine.dead = True
    edge.poll()
    assert edge.engine.changed == [("two", "/two")]
    reports = [edge.client.poll(0.001) for _ in range(2)]
    assert not any(report.changes for report in reports if report), "nobody asked for it now"
    edge.finish()


def test_closing_gives_up_an_engine_that_is_being_started() -> None:
    edge = Edge()
    edge.submit(request("a"))
    started = threading.Event()

    def slow(before: EngineInfo | None, given_up: Callable[[], bool]) -> Engine:
        started.set()
        while not given_up():
            time.sleep(0.001)
        raise EngineFailure("given up")

    edge.client._starting._start = slow  # type: ignore[assignment]
    edge.engine.dead = True
    failures: list[BaseException] = []

    def poll() -> None:
        try:
            edge.client.poll(0.001)
        except EngineFailure as failure:
            failures.append(failure)

    reader = threading.Thread(target=poll)
    reader.start()
    started.wait(5)
    edge.client.close()
    reader.join(5)
    assert not reader.is_alive() and failures


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_nothing_is_lost_and_nothing_comes_twice(seed: int) -> None:
    """Random submits, aborts, pauses, kills and faults; one of the requests may be poison."""
    rng, paused = random.Random(seed), set[str]()
    poison = request("poison", 30)
    edge = Edge({poison.seed: rng.randrange(20)} if seed % 3 == 0 else None)
    for step in range(150):
        if rng.random() < 0.15 and len(edge.live) < 25:
            edge.submit(request(f"r{step}", rng.randrange(1, 20), n=rng.choice([1, 1, 2])))
        if step == 40 and seed % 3 == 0:
            edge.submit(poison)
        if edge.live and rng.random() < 0.03:
            name = rng.choice([name for name in edge.live if name != "poison"] or [""])
            if name:
                edge.client.abort(name)
                del edge.live[name]
        if edge.live and rng.random() < 0.1 and edge.client.pause(name := rng.choice([*edge.live])):
            paused.add(name)
        if paused and rng.random() < 0.05:
            edge.client.resume(paused.pop())
        if step % 7 == 0 and rng.random() < 0.4:
            edge.engine.end, edge.engine.dead = EngineKilled, True
        edge.poll()
        assert not paused & {row.request.id.partition("~")[0] for row in edge.engine._rows}
    for name in paused:
        edge.client.resume(name)
    edge.finish()
    edge.check("poison") if "poison" in edge.live and "error" in edge.ends.values() else edge.check()
    if seed % 3 == 0:
        assert edge.ends["poison", 0] == "error"


def test_a_request_that_was_told_nothing_is_submitted_as_it_was() -> None:
    kept = UnfinishedRequest(request("a", n=2, prompt_logprobs=0))
    assert kept.replay_request() == kept.request
    kept.take(Output(request_id="a", index=1, tokens=[9]))
    again = kept.replay_request()
    assert again.emitted == ((), (9,)) and again.id == "a~2" and again.params.prompt_logprobs == 0
    kept.take(Output(request_id="a~2", index=1, tokens=[8], finish_reason="stop"))
    kept.take(Output(request_id="a~2", index=0, tokens=[7]))
    again = kept.replay_request()
    assert again.emitted == ((7,), None) and again.params.prompt_logprobs is None and kept.live
