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
from quire.core.sequence import Guide, Sequence
from test_scheduler import assert_golden
from turns import turns


class AnyText:
    """A guide that allows everything."""

    def complete(self, made: int) -> bool:
        return False

    def anew(self) -> Guide:
        return self


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


def structured(name: str, prompt: list[int], tokens: int, **more: Any) -> Request:
    """A request with a grammar."""
    return replace(request(name, prompt, tokens, eos=(), **more), grammar="any", tenant=name[0])


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


@pytest.mark.parametrize("seed", range(20))
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
