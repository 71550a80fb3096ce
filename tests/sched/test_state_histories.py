"""Recurrent states under random histories: forks, drafts, preemption, prefix hits and a pool of slots that is small."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from fake_runner import FakeEngine, next_token, request
from fake_states import FakeStates
from quire.core.sequence import Sequence
from quire.sched.token_budget import LEAST, MicroBatches, PrefillPace
from quire.speculate.draft_limits import room_for_drafts
from scheduler_histories import COMMON, ENGINES, Machine, assert_golden
from turns import turns, working

STATES: dict[str, st.SearchStrategy[Any]] = {
    "slots": st.integers(2, 12) | st.just(40),
    "interval": st.sampled_from([1, 2, 3, 9]),
    "close": st.sampled_from([1, 5, 192]),
}


class StateMachine(Machine):
    """The engine has slots of states, few of them."""

    @initialize(form=st.fixed_dictionaries(ENGINES | STATES))
    def start(self, form: dict[str, Any]) -> None:
        """Build an engine with states; `interval` in blocks."""

        def made(*args: Any, **options: Any) -> FakeEngine:
            interval = form["interval"] * form["block_size"]
            engine = FakeEngine(*args, slots=form["slots"], interval=interval, **options)
            assert engine.states.slots is not None
            engine.states.slots.close = form["close"]
            return engine

        self.made = made
        super().start(form)


StateMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, **COMMON)
TestStateMachine = StateMachine.TestCase


@pytest.mark.slow
class TestStatesLong(StateMachine.TestCase):  # type: ignore[name-defined,misc]
    """20,000 histories."""

    settings = settings(max_examples=20_000, stateful_step_count=30, **COMMON)


def engine_of(**options: Any) -> FakeEngine:
    return FakeEngine(
        64 * len(options.get("windows", (0,))),
        4,
        48,
        **({"slots": 16, "interval": 8, "max_num_batched_tokens": 64} | options),
    )


def run(engine: FakeEngine, *requests: Any) -> None:
    for each in requests:
        engine.submit(each)
    engine.drain()
    assert_golden(engine, list(requests))


def hit(engine: FakeEngine, name: str) -> int:
    return max(out.cached_tokens for (request_id, _), out in engine.ends.items() if request_id == name)


def test_a_prompt_begins_with_the_state_of_its_last_whole_block() -> None:
    engine = engine_of()
    run(engine, request("a", [*range(30)], 3))
    run(engine, request("b", [*range(30)], 3))
    assert hit(engine, "b") == 28


@pytest.mark.parametrize("device", [{}, {"ahead": True}, {"ahead": True, "late": True}])
@pytest.mark.parametrize("answer", range(1, 12))
def test_a_conversation_goes_on_behind_the_last_whole_block_of_the_answer(answer: int, device: dict[str, Any]) -> None:
    engine = engine_of(interval=40, **device)
    run(engine, request("a", [*range(22)], answer, eos=()))
    run(engine, request("b", [*range(22), *engine.outputs["a", 0], 1, 2, 3, 4], 2, eos=()))
    assert hit(engine, "b") == (22 + answer - 1) // 4 * 4


@pytest.mark.parametrize("windows", [(0,), (3,), (0, 3), (3, 9)])
def test_the_end_of_a_shared_prefix_has_a_snapshot_once_it_was_seen_twice(windows: tuple[int, ...]) -> None:
    engine = engine_of(interval=40, windows=windows)
    shared = [*range(17)]
    run(engine, request("a", [*shared, *range(20, 30)], 2))
    run(engine, request("b", [*shared, *range(30, 40)], 2))
    assert hit(engine, "b") == 0
    run(engine, request("c", [*shared, *range(40, 48)], 2))
    assert hit(engine, "c") == 16


def long_engine(slots: int) -> FakeEngine:
    options = {"slots": slots, "interval": 800, "max_num_batched_tokens": 512}
    return FakeEngine(2048, 4, 1024, **options)  # type: ignore[arg-type]


def test_while_slots_are_empty_snapshots_lie_close() -> None:
    engine, shared = long_engine(40), [i % 50 for i in range(500)]
    for name, tail in (("a", [1] * 90), ("b", [2] * 90), ("c", [3] * 90)):
        run(engine, request(name, [*shared, *tail], 2))
    assert [hit(engine, name) for name in "abc"] == [0, 384, 500]


def test_snapshots_lie_close_only_where_none_makes_room() -> None:
    engine = long_engine(6)
    for head in range(12):
        run(engine, request(f"r{head}", [head, *(i % 50 for i in range(600))], 2))
    assert engine.states.slots is not None
    values = engine.states.slots._values._snapshots.values()
    assert [each.tokens for each in values] == [600] * 5, "the ends of the last prompts; one slot is that of a state"


def test_an_answer_that_ends_by_its_end_token_leaves_its_last_state() -> None:
    engine = engine_of(interval=40, ahead=True, late=True)
    for head in range(12):
        first = request(f"a{head}", [head, *range(20)], 24, eos=(7, 8, 9, 10, 11, 12))
        run(engine, first)
        said = [*first.prompt, *engine.outputs[first.id, 0]]
        run(engine, request(f"b{head}", [*said, 1, 2, 3, 4], 2, eos=()))
        assert hit(engine, f"b{head}") == (len(said) - 1) // 4 * 4


def test_an_answer_that_is_not_wanted_any_more_leaves_its_last_state() -> None:
    engine = engine_of(interval=40)
    engine.submit(request("a", [*range(22)], 20, eos=()))
    while len(engine.outputs.get(("a", 0), [])) < 9:
        engine.step()
    engine.scheduler.abort("a")
    run(engine, request("b", [*range(22), *engine.outputs["a", 0], 1, 2, 3, 4], 2, eos=()))
    assert hit(engine, "b") == 28


def test_a_sequence_that_was_preempted_goes_on_behind_its_answer() -> None:
    engine = engine_of(interval=40)
    engine.submit(request("a", [*range(10)], 24, eos=()))
    while len(engine.outputs.get(("a", 0), [])) < 15:
        engine.step()
    (seq,) = engine.scheduler.running
    engine.scheduler._preempt(seq)
    engine.step()
    assert seq.computed == 25, "one token behind the last whole block"
    engine.drain()
    assert_golden(engine, [request("a", [*range(10)], 24, eos=())])


def test_siblings_each_leave_a_state() -> None:
    engine = engine_of(interval=40)
    run(engine, request("a", [*range(13)], 9, n=3, eos=()))
    for index in range(3):
        said = [*range(13), *engine.outputs["a", index]]
        run(engine, request(f"b{index}", [*said, 1, 2, 3, 4], 2, eos=()))
        assert hit(engine, f"b{index}") == 20


@pytest.mark.parametrize("seed", range(6))
def test_drafts_leave_the_last_state_of_an_answer(seed: int) -> None:
    engine = engine_of(interval=40, drafts=random.Random(seed))
    run(engine, request("a", [*range(11)], 24, eos=()))
    run(engine, request("b", [*range(11), *engine.outputs["a", 0], 1, 2, 3, 4], 2, eos=()))
    assert engine.accepted and hit(engine, "b") >= 28, "the state may stand before the last drafted tokens"


def test_where_no_slot_is_spare_no_state_is_held_back() -> None:
    engine = engine_of(slots=5, interval=40)
    requests = [request(f"r{i}", [i, *range(9)], 20, eos=()) for i in range(4)]
    for each in requests:
        engine.submit(each)
    while engine.scheduler.has_work:
        engine.step()
        assert engine.states.slots is not None and len(engine.states.slots._trails) <= 1
    assert_golden(engine, requests)
    assert not engine.scheduler.preemptions


def test_a_state_that_is_held_back_gives_way_to_who_comes() -> None:
    engine = engine_of(slots=6, interval=40)
    first = request("a", [*range(9)], 30, eos=())
    engine.submit(first)
    while len(engine.outputs.get(("a", 0), [])) < 9:
        engine.step()
    assert engine.states.slots is not None and engine.states.slots._trails
    later = [request(f"r{i}", [i, *range(9)], 20, eos=()) for i in range(3)]
    for each in later:
        engine.submit(each)
    engine.step()
    assert len(engine.scheduler.running) == 4
    engine.drain()
    assert not engine.scheduler.preemptions
    assert_golden(engine, [first, *later])


def test_drafts_run_tokens_again_and_change_nothing() -> None:
    engine = engine_of(drafts=random.Random(1))
    run(engine, *(request(f"r{i}", [i, *range(9)], 20, eos=()) for i in range(3)))
    assert engine.accepted and engine.rejected
    assert isinstance(engine.states, FakeStates) and engine.states.again


def test_drafts_that_fill_a_step_leave_room_to_run_them_again() -> None:
    """A step of 4: with a draft of 3, all of which held, nobody could run these again and go on."""
    form = {"blocks": 16, "block_size": 2, "budget": 4, "slots": 9, "interval": 3, "windows": (3,), "prefix": False,
            "policy": "fair", "drafts": 1971623525, "close": 192, "device": {"ahead": True, "late": True}}  # fmt: skip
    state = StateMachine()
    state.start(form=form)
    state.step(steps=6)
    state.step(steps=6)
    for head, length, most, n, priority, poison in (
        (0, 11, 19, 3, 1, True), (0, 9, 25, 1, 1, False), (0, 12, 10, 3, 0, False), (0, 1, 24, 1, 1, False),
        (2, 6, 19, 1, 0, False),
    ):  # fmt: skip
        who = ("a" if length in (12, 1) else "", "")
        state.submit(head=head, length=length, max_tokens=most, n=n, poison=poison, priority=priority, who=who)
    state.teardown()


@pytest.mark.parametrize("stages", [1, 2])
def test_one_whose_draft_held_goes_on_in_a_step_of_few_tokens(stages: int) -> None:
    """Steps are cut, by a target of their time or for several stages: not below what is run again, and a row."""
    target = 1.0 if stages == 1 else 0.0
    engine = FakeEngine(32, 2, 48, slots=16, prefix=False, max_num_batched_tokens=32, target_itl_ms=target)
    seq, many = drafted_whole(engine, 20)
    assert seq.again == many
    engine.scheduler.pace._decodes = 1.0
    engine.scheduler._portions = MicroBatches(stages, 8)
    engine.drain()
    assert len(engine.outputs["a", 0]) == 30


def test_what_is_run_again_is_no_prompt_to_who_learns_how_long_prompts_take() -> None:
    engine, pace = FakeEngine(32, 2, 48, slots=16, max_num_batched_tokens=32), PrefillPace(0.5)
    drafted_whole(engine, 5)
    pace.learn(engine.scheduler.plan(), 0.5)
    assert pace.budget(6, 100) == 6 + LEAST, "decodes alone take all of a step's time"


def drafted_whole(engine: FakeEngine, many: int) -> tuple[Sequence, int]:
    """A sequence all of whose draft of up to `many` tokens held in the last step, and how many these were."""
    engine.submit(request("a", [1, 2], 30, eos=()))
    for _ in turns(lambda: not engine.outputs):
        engine.step()
    (seq,) = engine.scheduler.running
    (many,), _ = room_for_drafts(engine.scheduler, [(seq, many)])
    for _ in range(many):
        seq.draft.tokens.append(next_token([*seq.tokens, *seq.draft.tokens], seq.index))
    engine.step()
    return seq, many


def test_no_row_is_run_again_without_drafts_and_forks() -> None:
    engine = engine_of()
    run(engine, *(request(f"r{i}", [i, *range(20)], 20, eos=()) for i in range(3)))
    assert isinstance(engine.states, FakeStates) and not engine.states.again


def test_siblings_begin_with_the_state_before_the_last_token_of_their_prompt() -> None:
    engine = engine_of()
    run(engine, request("a", [*range(13)], 6, n=3, eos=()))
    assert isinstance(engine.states, FakeStates) and engine.states.again == 1, "one of them computed that token before"


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_few_slots_are_enough(slots: int) -> None:
    engine = engine_of(slots=slots)
    run(engine, *(request(f"r{i}", [i % 2, *range(4 + i)], 12, n=1 + i % 2, eos=()) for i in range(6)))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(2, 9))
@settings(max_examples=40, deadline=None)
def test_snapshots_are_evicted_and_states_are_not(heads: list[int], slots: int) -> None:
    engine = engine_of(slots=slots, max_num_seqs=2)
    run(engine, *(request(f"r{i}", [head, *range(19)], 4) for i, head in enumerate(heads)))


def test_a_failed_request_leaves_no_snapshot() -> None:
    engine = engine_of()
    engine.poison.add("a")
    engine.submit(request("a", [*range(30)], 3))
    for _ in working(engine.scheduler, 100):
        engine.step()
    assert isinstance(engine.states, FakeStates) and not engine.states.pool.num_cached
