"""Sequences whose grammars take long have turns, and others have most of the time; what all of them say is the same."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future

import pytest

from fake_runner import FakeEngine, request
from quire.core.errors import GrammarTooComplex
from quire.core.request import Request
from quire.core.sequence import Guide as AnyGuide
from quire.core.sequence import Sequence
from quire.core.structured import StructuredOutputsParams
from quire.features.structured_output.plan_structured_output import SHARE, SLOW
from quire.text.structured import guide as guides
from quire.text.structured.grammar_reader import READER
from quire.text.structured.guide import Grammar, GrammarGuide
from quire.text.structured.vocabulary import vocabulary_of
from scheduler_histories import assert_golden
from shaped import VOCAB, tokenizer
from structured_requests import END, AnyText, structured

STEP = 0.001


def run(slow: list[Request], others: list[Request], seconds: float) -> tuple[FakeEngine, list[set[str]]]:
    """An engine that is drained, and who took part in each step; a step takes `STEP`, and `seconds` more for each slow
    one."""
    engine = FakeEngine(64, 4, 48, max_num_seqs=8, max_num_batched_tokens=64)
    now, steps = 0.0, list[set[str]]()
    engine.scheduler.clock = lambda: now

    def make(seq: Sequence) -> Future[AnyGuide]:
        ready = Future[AnyGuide]()
        ready.set_result(AnyText(seconds))
        return ready

    engine.scheduler.readying.make = make
    for each in (*slow, *others):
        engine.submit(each)
    plan = engine.scheduler.plan
    names = {each.id for each in slow}

    def watched():  # type: ignore[no-untyped-def]
        nonlocal now
        found = plan()
        steps.append({chunk.seq.request.id for chunk in found.chunks})
        now += STEP + seconds * len(names & steps[-1])
        return found

    engine.scheduler.plan = watched  # type: ignore[method-assign]
    engine.drain()
    assert_golden(engine, [*slow, *others])
    return engine, steps


def test_slow_ones_have_turns_and_a_share_of_the_time_while_others_run() -> None:
    slow = [structured(f"s{i}", [i, 5], 6) for i in range(3)]
    others = [request(f"o{i}", [i, 9], 40, eos=()) for i in range(2)]
    _, steps = run(slow, others, seconds := 4 * STEP)
    steps = steps[1:]  # in the first nobody is known to be slow
    beside = [step for step in steps if "o0" in step or "o1" in step]
    assert all(len(step & {"s0", "s1", "s2"}) <= 1 for step in steps), "two slow ones in a step"
    spent = seconds * sum(len(step & {"s0", "s1", "s2"}) for step in beside)
    assert spent <= 2 * SHARE * (spent + STEP * len(beside)), "slow ones take more than their share"
    first = [next(iter(step & {"s0", "s1", "s2"})) for step in steps if step & {"s0", "s1", "s2"}]
    assert max(Counter(first[:6]).values()) == 2, "one of them has more turns than another"


def test_whoever_is_slow_alone_never_rests() -> None:
    _, steps = run([structured("s", [1], 12)], [], 1.0)
    assert all(steps)


def test_fast_guides_are_in_every_step() -> None:
    _, steps = run([structured(f"s{i}", [i], 8) for i in range(3)], [], SLOW / 2)
    assert all(len(step) == 3 for step in steps[:8])


def test_a_sequence_whose_grammar_takes_long_too_often_ends() -> None:
    vocabulary = vocabulary_of(tokenizer(), VOCAB)
    read = READER.read(StructuredOutputsParams(regex="[ab]{1,20}"), (END,), vocabulary)
    guide = GrammarGuide(Grammar(read.grammar, vocabulary), 20, (END,), read.completion)
    for _ in range(10_000):
        guide.took(guides.SLOW)  # not long
    assert guide.seconds == pytest.approx(guides.SLOW)
    with pytest.raises(GrammarTooComplex, match="CPU time"):
        for _ in range(100):
            guide.took(guides.MOST_SECONDS / 20)
