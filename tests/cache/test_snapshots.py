"""Which snapshot of a recurrent state makes room: the one that saves least, by its chain, its branches and its age."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cache.snapshots import HALF_LIFE, PASSED, SnapshotValues


def keys(*chain: str) -> list[bytes]:
    """The keys of places of a chain, the last first."""
    return [name.encode() for name in reversed(chain)]


def everybody(slot: int) -> bool:
    """All slots are free."""
    return True


def test_what_a_conversation_passed_makes_room_before_its_end() -> None:
    values = SnapshotValues()
    values.add(0, 1000, keys("a"))
    values.add(1, 2000, keys("a", "b"))
    values.add(2, 3000, keys("a", "b", "c"))
    values.add(3, 500, keys("x"))
    assert [values.pop_least(everybody) for _ in range(2)] == [0, 1], "the end is worth what is behind the last one"
    assert values._snapshots[b"c"].saved == 3000, "what made room before it is computed anew now, too"
    assert [values.pop_least(everybody) for _ in range(2)] == [3, 2]


def test_where_many_conversations_part_is_worth_what_it_saves_each() -> None:
    values = SnapshotValues()
    values.add(0, 1000, keys("system"))
    for i in range(1, 6):
        values.add(i, 1300, keys("system", f"turn {i}"))
    assert [values.pop_least(everybody) for _ in range(4)] == [1, 2, 3, 4], "300 each, beside 1,000 of four others"
    assert values._snapshots[b"system"].comebacks == PASSED, "one is left, which has gone on"
    assert values.pop_least(everybody) == 0


def test_where_two_prompts_parted_counts_the_first_that_went_on_before() -> None:
    values = SnapshotValues()
    values.add(0, 1000, keys("shared"), shared=True)
    values.add(1, 1400, keys("shared", "second"))
    values.add(2, 900, keys("other"))
    assert values.pop_least(everybody) == 1


def test_a_prompt_is_not_passed_by_its_own_answer_but_by_whoever_goes_on_there() -> None:
    def parts(*more: str) -> SnapshotValues:
        values = SnapshotValues()
        values.add(0, 1000, keys("prompt"))
        values.add(1, 1200, keys("prompt", "answer"), answer=True)
        for slot, name in enumerate(more, 2):
            values.add(slot, 1300 + 100 * slot, keys("prompt", *name.split()))
        return values

    comebacks = {more: parts(*more)._snapshots[b"prompt"].comebacks for more in [(), ("answer b",), ("b",), ("b", "c")]}
    assert comebacks == {(): 0.5, ("answer b",): PASSED, ("b",): PASSED, ("b", "c"): 1.0}
    assert [parts().pop_least(everybody), parts("answer b").pop_least(everybody)] == [1, 1]
    values = parts("answer b")
    assert [values.pop_least(everybody) for _ in range(3)] == [1, 0, 2]


def test_what_nobody_comes_back_to_makes_room_in_the_end() -> None:
    values = SnapshotValues()
    values.add(0, 5000, keys("long ago"))
    gone = []
    for i in range(1, 120):
        values.add(i, 1000, keys(f"turn {i}"))
        if i > 3:
            gone.append(values.pop_least(everybody))
    uses = HALF_LIFE * 4 * math.log2(5)
    assert uses < gone.index(0) < 1.3 * uses, "it is worth five turns, of the last of four that have slots"


@pytest.mark.parametrize("keeps", [True, False])
def test_whether_conversations_keep_their_answers_is_learned(keeps: bool) -> None:
    values = SnapshotValues()
    for i in range(20):
        prompt, answer = f"prompt {i}", f"answer {i}"
        values.add(3 * i, 1000, keys(prompt))
        values.add(3 * i + 1, 1500, keys(prompt, answer), answer=True)
        if i < 19:
            values.add(3 * i + 2, 2000, keys(prompt, answer, "next") if keeps else keys(prompt, "next"))
    prompt, answer = (values._snapshots[f"{name} 19".encode()] for name in ("prompt", "answer"))
    assert (answer.comebacks > 0.9) == keeps and (prompt.comebacks > 0.9) != keeps


def test_who_is_used_again_stays() -> None:
    values = SnapshotValues()
    for i in range(4):
        values.add(i, 1000, keys(f"turn {i}"))
    values.use(0)
    assert [values.pop_least(everybody) for _ in range(4)] == [1, 2, 3, 0]
    values.use(0)
    assert len(values) == 0, "a slot that is no snapshot"


def test_nobody_makes_room_while_somebody_has_it() -> None:
    values = SnapshotValues()
    for i in range(3):
        values.add(i, 1000 * (i + 1), keys(f"turn {i}"))
    assert values.pop_least(lambda slot: slot == 2) == 2
    for slot in (0, 1):
        values.use(slot)
    assert values.pop_least(everybody) == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_least_is_the_least_of_all(seed: int) -> None:
    """Random trees of chains: what makes room is worth no more than any other, and chains stay whole."""
    rng, values, chains = random.Random(seed), SnapshotValues(), [["r"]]
    free, number = list(range(12)), 0
    for _ in range(80):
        if free and rng.random() < 0.7:
            number += 1
            chain = [*rng.choice(chains)[: rng.randint(1, 4)], f"n{number}"]
            chains.append(chain)
            values.add(free.pop(), 100 * len(chain), keys(*chain), rng.random() < 0.2, rng.random() < 0.4)
        elif len(values):
            worths = {each.slot: values.worth(each) for each in values._snapshots.values()}
            slot = values.pop_least(everybody)
            assert worths[slot] == min(worths.values())
            free.append(slot)
        if len(values) and rng.random() < 0.3:
            values.use(rng.choice([each.slot for each in values._snapshots.values()]))
        for key, each in values._snapshots.items():
            before = values._snapshots[each.before].tokens if each.before else 0
            assert each.saved == each.tokens - before
            behind = [values._snapshots[behind] for behind in each.behind]
            assert all(later.before == key for later in behind)
            assert each.passed == sum(not later.answer for later in behind) and not (each.answer and each.passed)
            assert each.before is None or key in values._snapshots[each.before].behind
    assert len(values._heap) <= 64 + 4 * 13
