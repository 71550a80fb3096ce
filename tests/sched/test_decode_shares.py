"""How decodes are divided among steps under way at one time."""

from __future__ import annotations

from collections import deque

from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.sequence import Sequence
from quire.sched.token_budget import MicroBatches


def decoding(number: int) -> Sequence:
    """One whose prompt is computed but for the last token."""
    request = Request(id=str(number), prompt=(5, 6, 7), params=SamplingParams(), seed=0, arrival=0.0)
    seq = Sequence(request, 0)
    seq.computed = 2
    return seq


def begin(portions: MicroBatches, unfinished: list[Sequence], rows: list[Sequence]) -> None:
    """As a plan does with what is ready."""
    portions.began(unfinished)
    launch(rows)


def launch(rows: list[Sequence]) -> None:
    """Compute them."""
    for seq in rows:
        seq.computed, seq.in_flight = seq.target, 1


def commit(rows: list[Sequence]) -> None:
    """As a result does."""
    for seq in rows:
        seq.in_flight = 0
        seq.tokens.append(9)


def test_small_groups_that_came_about_become_one_for_each_stage() -> None:
    rows, portions = [decoding(i) for i in range(16)], MicroBatches(stages=2, steps=4)
    steps = deque([rows[:2], rows[2:8], rows[8:11], rows[11:]])
    for step in steps:
        launch(step)
    portions._decoding = [*steps]
    sizes = []
    for _ in range(12):
        commit(steps.popleft())
        while len(steps) < 4 and (group := portions.ready(rows)):
            sizes.append(len(group))
            steps.append(group)
            begin(portions, rows, group)
        assert steps, "somebody always goes on"
    assert sizes[-4:] == [8] * 4 and len(steps) == 2


def test_prompts_do_not_wait_for_decodes() -> None:
    rows, portions = [decoding(i) for i in range(4)], MicroBatches(stages=2, steps=4)
    rows[3].computed = 0
    assert portions.ready(rows) == [rows[0], rows[1], rows[3]]
    begin(portions, rows, rows[:2])
    assert portions.ready(rows) == [rows[2], rows[3]]
    begin(portions, rows, rows[2:])
    assert portions.ready(rows) == []
    commit(rows[:1])
    assert portions.ready(rows) == [], "it goes with the other one, of the two steps under way"
    commit(rows[1:2])
    assert portions.ready(rows) == rows[:2]
