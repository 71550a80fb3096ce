"""Random histories of a scheduler, checked after every step."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from fake_runner import FakeEngine, golden, request
from quire.core.errors import BadRequest
from quire.core.request import Request


def assert_golden(engine: FakeEngine, requests: list[Request]) -> None:
    for req in requests:
        for index in range(req.params.n):
            want = golden(req, index, engine.max_model_len)
            assert engine.outputs[req.id, index] == want
            reason = engine.ends[req.id, index].finish_reason
            assert reason == ("stop" if want[-1] in req.eos_token_ids else "length")


ENGINES: dict[str, st.SearchStrategy[Any]] = {
    "blocks": st.integers(3, 24),
    "block_size": st.sampled_from([1, 2, 4, 8]),
    "windows": st.sampled_from([(0,), (0,), (3,), (9,), (0, 3), (9, 0), (0, 3, 9), (4, 9)]),
    "prefix": st.booleans(),
    "budget": st.integers(4, 40),
    "policy": st.sampled_from(["fcfs", "priority", "fair"]),
    "device": st.sampled_from([{}, {"ahead": True}, {"ahead": True, "late": True}]),
    "drafts": st.none() | st.integers(0, 2**32),
}
"""The fake engine's pool, limits and queues; one of two guesses tokens ahead, some of them by drafts that branch."""


class Machine(RuleBasedStateMachine):
    """Random submits, aborts, forks, poison and steps under a pool that is far too small."""

    made: Any = FakeEngine

    @initialize(form=st.fixed_dictionaries(ENGINES))
    def start(self, form: dict[str, Any]) -> None:
        """Build an engine."""
        self.engine = self.made(
            form["blocks"] * len(form["windows"]),
            form["block_size"],
            40,
            form["windows"],
            form["prefix"],
            max_num_batched_tokens=form["budget"],
            scheduling_policy=form["policy"],
            drafts=None if form["drafts"] is None else random.Random(form["drafts"]),
            **form["device"],
        )
        self.live: dict[str, Request] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.count = 0

    @rule(
        head=st.integers(0, 2),
        length=st.integers(1, 39),
        max_tokens=st.integers(1, 30),
        n=st.integers(1, 3),
        who=st.sampled_from([("", ""), ("a", ""), ("", ""), ("", "a")]),
        priority=st.integers(-1, 1),
        poison=st.sampled_from([False, False, False, True]),
    )
    def submit(
        self, head: int, length: int, max_tokens: int, n: int, who: tuple[str, str], priority: int, poison: bool
    ) -> None:
        """Add a request whose prompt shares its beginning with others, of the same tenant and adapter or not."""
        self.count += 1
        edited = {"presence_penalty": 1.0} if self.count % 5 == 0 else {}
        req = request(f"r{self.count}", [head, *range(length - 1)], max_tokens, n, who[0], priority, **edited)
        req = replace(req, tenant=who[0], adapter=who[1], weight=1.0 + head)
        try:
            self.engine.submit(req)
        except BadRequest:
            return
        self.live[req.id] = req
        if poison:
            self.engine.poison.add(req.id)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        """Abort any request, finished or not."""
        name = list(self.live)[pick % len(self.live)]
        self.engine.scheduler.abort(name)
        self.aborted |= {(name, index) for index in range(self.live[name].params.n)}

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 1000), index=st.integers(0, 3))
    def abort_one(self, pick: int, index: int) -> None:
        """Abort one sequence of any request, whether its prompt is computed or not; the others go on."""
        name = list(self.live)[pick % len(self.live)]
        self.engine.scheduler.abort(name, index)
        self.aborted.add((name, index))

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        """Run some steps."""
        for _ in range(steps):
            self.engine.step()

    @invariant()
    def ownership(self) -> None:
        """Blocks add up between steps, too."""
        if hasattr(self, "engine"):
            self.engine.pool.check()

    def teardown(self) -> None:
        """Every request ends; what it said is what it would have said alone (or its beginning, if it was cut short)."""
        if not hasattr(self, "engine"):
            return
        self.engine.drain()
        for req in self.live.values():
            for index in range(req.params.n):
                got = self.engine.outputs.get((req.id, index), [])
                want = golden(req, index, self.engine.max_model_len)
                end = self.engine.ends.get((req.id, index))
                assert got == want[: len(got)]
                if (req.id, index) in self.aborted:
                    continue
                assert end is not None, f"{req.id}/{index} never ended"
                if req.id in self.engine.poison:
                    assert end.finish_reason == "error"
                elif got != want:
                    held = len(req.prompt) + len(got)
                    assert end.finish_reason == "length", "only a sequence that outgrew the pool may be cut"
                    assert self.engine.sizes.footprint(held) > self.engine.pool.num_blocks


COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "report_multiple_bugs": False}
