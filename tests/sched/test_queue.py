"""The waiting line: the order of a plain sorted list, and no more work where many wait."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fake_runner import FakeEngine, request
from quire.core.sequence import Sequence
from quire.sched.policy import POLICIES, Fair, Policy, WaitingQueue

TENANTS = "abcd"


class Plain:
    """What a queue must do: look at everybody."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.items = policy, list[Sequence]()

    def head(self) -> Sequence:
        return min(self.items, key=self.policy.rank)


def sequence(policy: Policy, ticket: int, tenant: str, priority: int, index: int) -> Sequence:
    seq = Sequence(replace(request(f"r{ticket}", [1, 2, 3], 9, priority=priority), tenant=tenant), index)
    seq.order = policy.order(seq, ticket)
    return seq


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "push", "pop", "remove", "again", "serve"]),
        st.sampled_from(TENANTS),
        st.integers(-1, 1),
        st.integers(0, 1000),
    ),
    max_size=120,
)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(operations=OPERATIONS)
@settings(max_examples=60, deadline=None)
def test_who_is_the_next_is_who_a_sorted_list_would_say(name: str, operations: list[tuple[str, str, int, int]]) -> None:
    policy = POLICIES[name]()
    queue, plain, gone, ticket = policy.queue(), Plain(policy), list[Sequence](), 0
    for kind, tenant, priority, pick in operations:
        if kind == "push":
            ticket += 1
            plain.items.append(sequence(policy, ticket, tenant, priority, pick % 2))
            queue.push(plain.items[-1])
        elif kind == "again" and gone:  # as one that is preempted: its place is an old one
            plain.items.append(gone.pop(pick % len(gone)))
            queue.push(plain.items[-1])
        elif kind == "pop" and plain.items:
            gone.append(queue.pop())
            assert gone[-1] is plain.head()
            plain.items.remove(gone[-1])
        elif kind == "remove" and plain.items:
            gone.append(plain.items.pop(pick % len(plain.items)))
            queue.remove(gone[-1])
        elif kind == "serve":
            served = sequence(policy, 0, tenant, 0, 0)
            served.computed = 3
            policy.served(served, 1 + pick % 3)
        assert len(queue) == len(plain.items)
        if plain.items:
            assert queue.head() is plain.head()
    listed = list(queue)
    assert sorted(listed, key=lambda seq: seq.order) == sorted(plain.items, key=lambda seq: seq.order)
    assert name == "fair" or listed == sorted(plain.items, key=lambda seq: seq.order)


def test_a_tenant_begins_near_the_one_that_was_served_least() -> None:
    """Whoever else has work, has had, or was served since."""
    policy, active = Fair(), dict[str, int]()
    for i in range(200):
        tenant = f"t{i * 7 % 23}"
        asked = replace(request(f"r{i}", [1] * 3000, 9), tenant=tenant)
        least = min(map(policy.counter, active), default=0.0)
        before = policy.counter(tenant)
        policy.joins(asked)
        known = not active or tenant in active
        assert policy.counter(tenant) == (before if known else max(before, least - 1000.0))
        active[tenant] = active.get(tenant, 0) + 1
        served = Sequence(asked)
        served.computed = 1000 + i
        policy.served(served, served.computed)
        leaving = f"t{i * 5 % 23}"
        if active.get(leaving):
            policy.leaves(replace(asked, tenant=leaving))
            active[leaving] -= 1
            if not active[leaving]:
                del active[leaving]


class Counted:
    """One that waits, and counts how often it is compared with another."""

    compared = 0

    def __init__(self, place: int) -> None:
        self.order = (0.0, place, 0)

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return self is other

    def __hash__(self) -> int:
        return self.order[1]


def test_one_that_goes_is_not_looked_for() -> None:
    queue: Any = WaitingQueue()
    items = [Counted(i) for i in range(5000)]
    for each in items:
        queue.push(each)
    Counted.compared = 0
    for each in items[4000:4100]:
        queue.remove(each)
    assert Counted.compared < 1000 and len(queue) == 4900


def test_what_went_is_not_kept() -> None:
    """In front of whom nobody comes: entries of those that left would pile up behind."""
    queue = WaitingQueue()
    policy = Policy()
    queue.push(sequence(policy, 0, "a", 0, 0))
    for i in range(1, 5000):
        queue.push(late := sequence(policy, i, "a", 0, 0))
        queue.remove(late)
    assert len(queue._heap) < 200


@pytest.mark.parametrize("blocks", [12, 200])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_step_walks_over_nobody_that_waits(policy: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full pool or not; nor does whoever comes or goes."""
    engine = FakeEngine(blocks, 4, 40, scheduling_policy=policy)
    for i in range(100):
        asked = request(f"r{i}", [i % 3, 5, *range(i % 9)], 6 + i % 5, n=1 + i % 2, eos=(), priority=i % 3)
        engine.submit(replace(asked, tenant=f"t{i % 40}"))
    looked, counter = 0, Fair.counter

    def counted(self: Fair, tenant: str) -> float:
        nonlocal looked
        looked += 1
        return counter(self, tenant)

    def walks(self: object) -> Any:
        raise AssertionError("it walks over all")

    class Requests(dict[str, list[Sequence]]):
        values = items = __iter__ = walks  # type: ignore[assignment]

    scheduler = engine.scheduler
    scheduler.requests = Requests(scheduler.requests)
    monkeypatch.setattr(Fair, "counter", counted)
    monkeypatch.setattr(WaitingQueue, "__iter__", walks)
    monkeypatch.setattr(type(scheduler.waiting), "__iter__", walks)
    for i in range(30):
        before = looked
        plan, results = engine.launch()
        scheduler.commit(plan, results())
        assert looked - before < 120, "of tenants, only those that run or come up are looked at"
        scheduler.abort(f"r{99 - i}")
        scheduler.add(replace(request(f"more{i}", [1, 2, 3], 5), tenant=f"t{i % 50}"))
