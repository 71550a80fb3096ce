"""When requests are due, and what conversations say: distributions against their formulas, on no clock at all."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from quire.bench.arrivals import due_times, kind_of
from quire.bench.loads import ServeLoad
from quire.bench.sessions import ThinkTime, workload_of
from quire.core.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "at-once"),
        ({"max_concurrency": 4}, "closed"),
        ({"request_rate": 2.0}, "poisson"),
        ({"request_rate": 2.0, "max_concurrency": 4}, "poisson"),
        ({"request_rate": 2.0, "burstiness": 0.5}, "gamma"),
        ({"request_rate": 2.0, "arrivals": "constant"}, "constant"),
        ({"ramp_up_end_rps": 2.0}, "ramp"),
        ({"trace": "x"}, "trace"),
        ({"trace": "x", "request_rate": 2.0}, "poisson"),
        ({"trace": "x", "arrivals": "at-once"}, "at-once"),
    ],
)
def test_arrivals_are_named_or_implied(options: dict[str, Any], kind: str) -> None:
    assert kind_of(ServeLoad(**options)) == kind


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arrivals": "uniform"}, "known are at-once, constant"),
        ({"arrivals": "poisson"}, "needs --request-rate"),
        ({"arrivals": "poisson", "request_rate": 1.0, "burstiness": 2.0}, "name gamma"),
        ({"arrivals": "at-once", "request_rate": 1.0}, "have none"),
        ({"arrivals": "closed"}, "needs --max-concurrency"),
        ({"arrivals": "ramp"}, "needs --ramp-up-start-rps"),
        ({"ramp_up_end_rps": 1.0, "ramp_up_strategy": "exponential"}, "no rate grows from 0"),
        ({"ramp_up_end_rps": 1.0, "ramp_up_strategy": "steps"}, "known are linear"),
        ({"ramp_up_end_rps": 1.0, "arrivals": "closed", "max_concurrency": 1}, "arrivals are closed"),
        ({"arrivals": "trace"}, "needs --trace"),
    ],
)
def test_arrivals_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kind_of(ServeLoad(**options))


def test_constant_arrivals_are_evenly_apart() -> None:
    load = ServeLoad(request_rate=4.0, arrivals="constant")
    assert due_times(load, 5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert due_times(ServeLoad(max_concurrency=2), 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
@pytest.mark.parametrize(("start", "end"), [(2.0, 20.0), (20.0, 2.0), (5.0, 5.0)])
def test_a_ramp_goes_from_one_rate_to_the_other(strategy: str, start: float, end: float) -> None:
    """Without noise: gaps are the reciprocal of a rate that moves in time as its formula says."""
    load = ServeLoad(
        arrivals="ramp", burstiness=1e9, ramp_up_start_rps=start, ramp_up_end_rps=end, ramp_up_strategy=strategy
    )
    due = due_times(load, 4000)
    rates = [1 / (b - a) for a, b in itertools.pairwise(due)]
    assert rates[0] == pytest.approx(start, rel=0.02) and rates[-1] == pytest.approx(end, rel=0.02)
    middle = next(i for i, at in enumerate(due) if at >= due[-1] / 2)
    half = (start + end) / 2 if strategy == "linear" else math.sqrt(start * end)
    assert rates[middle] == pytest.approx(half, rel=0.02)


def test_a_ramp_from_nothing_and_to_nothing() -> None:
    up = due_times(ServeLoad(ramp_up_end_rps=10.0, burstiness=1e9), 1000)
    assert up[-1] == pytest.approx(2 * 1000 / 10, rel=0.01) and up[250] == pytest.approx(up[-1] / 2, rel=0.01)
    down = due_times(ServeLoad(ramp_up_start_rps=10.0, seed=1), 1000)
    assert all(b >= a for a, b in itertools.pairwise(down)) and math.isfinite(down[-1])


def test_a_conversation_says_more_at_each_turn() -> None:
    load = ServeLoad(
        num_prompts=40, turns="2:4", think_time="0.5:2", input_len="3:5", output_len="2", shared_prefix=6, seed=3
    )
    found = workload_of(load)
    assert found.name == "conversations"
    turns = [len(session.turns) for session in found.sessions]
    assert set(turns) == {2, 3, 4} and found.requests == sum(turns)
    openings = [session.turns[0].new() for session in found.sessions]
    assert len({tuple(said[:6]) for said in openings}) == 1 and len({tuple(said[6:]) for said in openings}) == 40
    for session in found.sessions:
        assert session.turns[0].think == 0 and all(0.5 <= turn.think <= 2 for turn in session.turns[1:])
        assert all(len(turn.new()) == turn.input_tokens for turn in session.turns)
        assert all(3 <= turn.input_tokens <= 5 for turn in session.turns[1:])
    later = {tuple(session.turns[1].new()) for session in found.sessions}
    assert len(later) == 40 and later.isdisjoint({tuple(said[6:]) for said in openings})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"turns": "0"}, "--turns"),
        ({"turns": "5000"}, "at most 1000"),
        ({"think_time": "x"}, "--think-time"),
        ({"think_time": "2:1"}, "--think-time"),
        ({"think_time": "inf"}, "--think-time"),
        ({"trace": "x", "turns": "2"}, "not with --trace"),
        ({"trace_speed": 2.0}, "name it: --trace FILE"),
    ],
)
def test_workloads_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        workload_of(ServeLoad(**options))


def test_what_does_not_fit_the_context_is_refused_before_it_is_sent() -> None:
    load = ServeLoad(input_len="10", output_len="5", turns="3", num_prompts=2)
    assert workload_of(load, longest=45).requests == 6
    with pytest.raises(ConfigError, match="up to 45 tokens, but the server's context holds 44"):
        workload_of(load, longest=44)


def test_spans() -> None:
    assert ThinkTime.parse("0.5", "think-time") == ThinkTime(0.5, 0.5)
    assert ThinkTime.parse("0:2", "think-time") == ThinkTime(0.0, 2.0)
