"""Who waits for what, and when they come back: never into a plan that is made beside steps under way."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import pytest
from msgspec.structs import replace

from fake_runner import FakeEngine, request
from quire.core.errors import BadRequest
from quire.core.request import Request
from quire.core.sequence import Guide, Sequence, Status
from quire.sched.token_budget import MicroBatches
from scheduler_histories import assert_golden
from structured_requests import AnyText, structured
from turns import turns, working


class Compiling:
    """Grammars that become ready when a test says so."""

    def __init__(self, engine: FakeEngine) -> None:
        self.futures: list[Future[Guide]] = []
        engine.scheduler.readying.make = self.make

    def make(self, seq: Sequence) -> Future[Guide]:
        self.futures.append(Future())
        return self.futures[-1]

    def ready(self, count: int = 1, error: Exception | None = None) -> None:
        """The first `count` that are not, or all of them."""
        for future in self.futures[:count]:
            if not future.set_running_or_notify_cancel():
                continue
            if error is None:
                future.set_result(AnyText())
            else:
                future.set_exception(error)
        del self.futures[:count]


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_a_grammar_that_is_ready_while_a_step_is_under_way_preempts_nothing_in_flight(policy: str) -> None:
    engine = FakeEngine(64, 4, 48, ahead=True, late=True, scheduling_policy=policy, max_num_seqs=2)
    compiling = Compiling(engine)
    plain = [replace(request(f"a{i}", [i, 2, 3], 20, n=2, eos=(), priority=5), tenant="a") for i in range(2)]
    urgent = structured("b", [7, 8, 9], 4, priority=0)
    for each in (*plain, urgent):
        engine.submit(each)
    plan_ahead = engine.scheduler.may_plan_ahead

    def ready_in_between() -> bool:
        """Between the question whether to plan ahead and the plan."""
        found = plan_ahead()
        compiling.ready()
        return found

    engine.scheduler.may_plan_ahead = ready_in_between  # type: ignore[method-assign]
    engine.drain()
    assert engine.scheduler.preemptions, "the urgent one got the place of another"
    assert_golden(engine, [*plain, urgent])


@pytest.mark.parametrize("seed", range(8))
def test_outputs_do_not_depend_on_when_grammars_are_ready(seed: int) -> None:
    rng = random.Random(seed)
    engine = FakeEngine(
        rng.choice((14, 24)), 4, 48, ahead=True, late=rng.random() < 0.5, max_num_batched_tokens=16,
        scheduling_policy=rng.choice(("fcfs", "priority", "fair")), max_num_seqs=rng.choice((2, 4)),
    )  # fmt: skip
    compiling, sent = Compiling(engine), list[Request]()
    more = [
        (structured if i % 2 else request)(
            f"{'abc'[i % 3]}{i}", [rng.randrange(3), *range(rng.randrange(12))], rng.randint(2, 20),
            n=rng.choice((1, 3)), priority=rng.randrange(3),
        )
        for i in range(30)
    ]  # fmt: skip
    for _ in turns(lambda: more or engine.scheduler.has_work):
        for _ in range(min(len(more), rng.randint(0, 2))):
            try:
                engine.submit(more[-1])
                sent.append(more[-1])
            except BadRequest:
                pass
            more.pop()
        if rng.random() < 0.3 or not more:
            compiling.ready(rng.randint(1, 3))
        if engine.scheduler.has_work:
            engine.step()
    assert_golden(engine, sent)


def test_statuses_say_what_each_waits_for() -> None:
    engine = FakeEngine(64, 4, 48, max_num_seqs=1)
    compiling = Compiling(engine)
    for each in (request("a", [1, 2], 4, n=2), structured("b", [3, 4], 4), request("c", [5], 3)):
        engine.submit(each)

    def statuses() -> list[Status]:
        return [seq.status for siblings in engine.scheduler.requests.values() for seq in siblings]

    grammar = getattr(Status, "WAITING_FOR_GRAMMAR", None)
    assert statuses() == [Status.WAITING, Status.PENDING, grammar, Status.WAITING]
    engine.step()
    assert statuses() == [Status.RUNNING, Status.WAITING, grammar, Status.WAITING]
    compiling.ready()
    engine.step()
    assert statuses() == [Status.RUNNING, Status.WAITING, Status.WAITING, Status.WAITING]
    engine.drain()


def test_nothing_in_flight_is_preempted() -> None:
    engine = FakeEngine(64, 4, 48)
    engine.submit(request("a", [1, 2, 3], 9))
    engine.launch()
    (seq,) = engine.scheduler.running
    assert seq.steps_in_flight == 1
    with pytest.raises(AssertionError, match="preempted while a step under way"):
        engine.scheduler._preempt(seq)


def test_a_grammar_that_cannot_be_made_ends_its_request_alone() -> None:
    engine = FakeEngine(64, 4, 48, ahead=True)
    compiling, good = Compiling(engine), request("good", [1, 2, 3], 9)
    for each in (good, structured("bad", [3, 4], 4, n=2), structured("worse", [3, 4], 4), structured("fine", [3], 4)):
        engine.submit(each)
    engine.step()
    compiling.ready(2, ValueError("no such grammar"))
    compiling.ready()
    engine.drain()
    assert_golden(engine, [good, request("fine", [3], 4, eos=())])
    for key in (("bad", 0), ("bad", 1), ("worse", 0)):
        assert engine.ends[key].error_kind == "PartFailure" and "grammar: " in engine.ends[key].error


def test_many_grammars_that_are_not_ready_cost_no_step_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(64, 4, 48)
    compiling, asked = Compiling(engine), 0
    for i in range(120):
        engine.submit(structured(f"s{i}", [1, 2], 3))
    engine.submit(request("plain", [1, 2, 3], 9, eos=()))
    done = Future.done

    def counted(self: Future[Guide]) -> bool:
        nonlocal asked
        asked += 1
        return done(self)

    monkeypatch.setattr(Future, "done", counted)
    for _ in range(9):
        engine.step()
    assert ("plain", 0) in engine.ends and asked < 50
    compiling.ready(120)
    engine.drain()
    assert len(engine.ends) == 121


def test_who_ends_in_a_plan_without_chunks_is_told_though_nothing_comes_of_the_plan() -> None:
    engine = FakeEngine(4, 4, 48, prefix=False)
    engine.submit(request("long", [1] * 15, 20, eos=()))
    for _ in turns(lambda: True):
        plan, results = engine.launch()
        if plan.preempted:
            break
        engine.scheduler.commit(plan, results())
    assert not plan.chunks and not engine.scheduler.has_work, "it outgrew the cache, and nobody commits that plan"
    engine.submit(request("next", [1, 2], 3, eos=()))
    engine.step()
    assert engine.ends["long", 0].finish_reason == "length"
    engine.drain()


def state(engine: FakeEngine) -> list[Any]:
    """All that plans depend on."""
    scheduler = engine.scheduler
    everybody = [seq for siblings in scheduler.requests.values() for seq in siblings]
    free = []
    at = engine.pool._next[engine.pool.num_blocks]
    while at < engine.pool.num_blocks:
        free.append(at)
        at = engine.pool._next[at]
    seqs = [
        (seq.request.id, seq.index, list(seq.tokens), list(seq.draft.tokens), list(seq.draft.parents), seq.computed,
         seq.in_flight, seq.steps_in_flight, [list(table) for table in seq.kv.blocks], seq.status, seq.kv.published)
        for seq in everybody
    ]  # fmt: skip
    steps = [list(step) for step in scheduler._portions._decoding]
    return [seqs, free, list(engine.pool.refs), steps, [str(seq) for seq in scheduler.running], len(scheduler.waiting)]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("stages", [1, 2])
def test_to_ask_whether_to_plan_ahead_changes_nothing(stages: int, policy: str) -> None:
    """Neither drafts, nor blocks of those that wait, nor which decodes go together."""
    rng, yes = random.Random(stages), 0
    for blocks in (12, 40):
        engine = FakeEngine(blocks, 4, 48, scheduling_policy=policy, max_num_batched_tokens=9, max_num_seqs=3)
        engine.scheduler._portions = MicroBatches(stages, 2)
        for i in range(14):
            asked = request(f"r{i}", [i % 2, *range(rng.randrange(1, 16))], rng.randint(3, 20), n=1 + i % 3,
                            priority=rng.randrange(3))  # fmt: skip
            engine.submit(replace(asked, tenant="ab"[i % 2]))
        for _ in working(engine.scheduler):
            engine.draft(rng)
            before = state(engine)
            yes += engine.scheduler.may_plan_ahead()
            assert state(engine) == before
            plan, results = engine.launch()
            before = state(engine)
            yes += engine.scheduler.may_plan_ahead()
            assert state(engine) == before
            engine.scheduler.commit(plan, results())
    assert yes > 10
