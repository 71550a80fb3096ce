"""Drafts in the scheduler: whose blocks they write, what becomes of them, what is refused."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from fake_runner import FakeEngine, request
from quire.core.errors import ConfigError
from quire.core.plan import ChunkResult
from quire.core.sequence import Sequence
from quire.core.speculation import parse_speculation
from quire.speculate.draft_length import CostModel
from quire.speculate.draft_limits import room_for_drafts, undrafted
from scheduler_histories import assert_golden
from turns import turns


@pytest.mark.parametrize("windows", [(0,), (5,), (0, 5)])
@pytest.mark.parametrize(("blocks", "block_size"), [(96, 4), (12, 4), (48, 1)])
def test_drafts_change_no_output(blocks: int, block_size: int, windows: tuple[int, ...]) -> None:
    drafts = random.Random(blocks)
    engine = FakeEngine(blocks * len(windows), block_size, 48, windows, drafts=drafts, max_num_batched_tokens=16)
    requests = [request(f"r{i}", [i % 3, *range(2 + 3 * i)], 3 + 5 * (i % 4), n=1 + i % 3) for i in range(9)]
    for req in requests:
        engine.submit(req)
    engine.drain()
    assert_golden(engine, requests)
    assert engine.accepted > 15 and engine.rejected > 3 and engine.moved


def test_a_draft_takes_no_block_that_others_need() -> None:
    engine = FakeEngine(num_blocks=6, block_size=4, max_model_len=30, drafts=random.Random(1))
    requests = [request(f"r{i}", [i, 2, 3], 6, eos=()) for i in range(3)]
    for req in requests:
        engine.submit(req)
    engine.drain()
    assert_golden(engine, requests)


def test_blocks_for_a_draft_that_the_budget_cuts_are_given_back() -> None:
    engine, seq = drafted(1, 0)
    limits, before = room_for_drafts(engine.scheduler, [(seq, 5)])
    assert limits == [5] and not before.chunks
    seq.draft.tokens = [1] * 5
    engine.step()
    assert not seq.draft.tokens and len(seq.kv.blocks[0]) == -(-seq.computed // 4)


def test_nobody_is_preempted_for_blocks_of_what_the_budget_cuts_from_a_draft() -> None:
    engine = FakeEngine(64, 1, 48, max_num_batched_tokens=4, scheduling_policy="priority")
    requests = [request(name, [1, 2], 9, priority=priority, eos=()) for name, priority in (("late", 1), ("urgent", 0))]
    for req in requests:
        engine.submit(req)
        engine.step()
    late, urgent = engine.scheduler.running
    assert room_for_drafts(engine.scheduler, [(urgent, 3)])[0] == [3]
    urgent.draft.tokens = [20] * 3
    for _ in range(engine.pool.num_free):
        engine.pool.allocate()
    plan = engine.scheduler.plan()
    assert not plan.preempted and {chunk.seq: chunk.count for chunk in plan.chunks} == {late: 1, urgent: 3}


def test_a_draft_whose_rows_are_no_numbers_is_dropped_with_all_it_wrote() -> None:
    engine, seq = drafted(8, 3)
    plan = engine.scheduler.plan()
    own = list(seq.kv.blocks[0])
    assert engine.scheduler.commit(plan, [ChunkResult([], [], [], retry_without_draft=True)]) == []
    assert not seq.draft.enabled and not seq.draft.tokens and seq.tokens[-1] == engine.outputs["r", 0][-1]
    scrubbed = set(engine.scheduler.block_work.wipes)
    assert own[-1] in scrubbed, "the block that the draft wrote is wiped before anyone reads it"
    engine._launched = None
    engine.drain()
    assert len(engine.outputs["r", 0]) == 9


def drafted(budget: int, draft: int, **limits: int) -> tuple[FakeEngine, Sequence]:
    """An engine whose only sequence has 8 tokens, 7 of them computed, and a draft."""
    engine = FakeEngine(64, 4, 48, max_num_batched_tokens=budget, **limits)
    engine.submit(request("r", [1, 2, 3, 4, 5, 6, 8], 9, eos=()))
    for _ in turns(lambda: not engine.outputs.get(("r", 0))):
        engine.step()
    (seq,) = engine.scheduler.running
    seq.draft.tokens = list(range(20, 20 + draft))
    return engine, seq


@pytest.mark.parametrize(("budget", "kept"), [(8, 5), (6, 5), (5, 4), (2, 1), (1, 0)])
def test_a_draft_that_the_budget_cuts_shrinks(budget: int, kept: int) -> None:
    engine, seq = drafted(budget, 5)
    (chunk,) = engine.scheduler.plan().chunks
    assert (chunk.start, chunk.count, chunk.logits, len(seq.draft.tokens)) == (7, 1 + kept, 1 + kept, kept)


def test_a_sequence_that_is_preempted_gives_up_its_draft() -> None:
    engine, seq = drafted(8, 5)
    engine.scheduler._preempt(seq)
    assert seq.draft.tokens == [] and seq.target == 8


def model_of(
    step: dict[int, float], passes: bool = False, each: float = 0.0, most: int = 6, at_once: bool = False
) -> CostModel:
    """A cost model that has seen steps of so many rows, and passes of one sequence."""
    cost = CostModel(passes, most, at_once=at_once)
    for rows, seconds in step.items():
        cost.stepped(rows, 9 * seconds)  # it is recorded
        cost.stepped(rows, seconds)
    if each:
        cost.drafted([1], 9 * each)
        cost.drafted([1], each)
    return cost


def drafted_seq(kept: float, tried: float, draft: int = 0) -> Sequence:
    """A sequence of which `kept` of `tried` guesses were right."""
    seq = Sequence(request("r", [1, 2, 3], 9))
    seq.draft.acceptance, seq.draft.tokens = (kept, tried), [7] * draft
    return seq


def depth(cost: CostModel, kept: float) -> int:
    """Tokens to draft for a sequence of which `kept` of a hundred guesses were right, once a trial is over."""
    seqs = [drafted_seq(kept, 100)]
    cost.depth(seqs, 1)
    return cost.depth(seqs, 1)[1]


def test_as_many_are_drafted_as_pay() -> None:
    flat, steep = {1: 1.0, 8: 1.05}, {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
    assert depth(model_of(flat, True, 0.05), 90) == 6
    assert depth(model_of(flat, True, 0.3), 90) in range(1, 6)
    assert depth(model_of(flat, True, 0.9), 90) == 0
    assert depth(model_of(steep, True, 0.01), 90) == 0
    assert depth(model_of(flat, True, 0.05), 0) == 0


def test_of_a_block_that_one_pass_drafts_the_length_costs_nothing() -> None:
    flat = {1: 1.0, 8: 1.05}
    assert depth(model_of(flat, True, 0.9, at_once=True), 90) == 6
    assert depth(model_of(flat, True, 4.9, at_once=True), 90) == 0


def test_of_a_block_the_rows_of_its_pass_are_what_it_costs() -> None:
    """A pass of two rows is cheap, one of five is not: a block of one token pays, longer ones do not."""
    cost = model_of({1: 1.0, 8: 1.05}, True, at_once=True)
    for limit, seconds in ((1, 0.1), (4, 9.0)):
        for _ in range(2):
            cost.drafted([limit], seconds)
    assert depth(cost, 90) == 1


def test_likely_tokens_are_verified_and_unlikely_ones_cut() -> None:
    sure, unsure = drafted_seq(95, 100, 6), drafted_seq(5, 100, 6)
    model_of({2: 1.0, 8: 1.4, 14: 3.0}).cut([sure, unsure], 2)
    assert len(sure.draft.tokens) > 3 > len(unsure.draft.tokens)


def test_drafting_is_tried_again_but_less_and_less() -> None:
    cost, tries = model_of({1: 1.0, 2: 2.0, 4: 4.0}, True, 0.5), []
    for step in range(900):
        if cost.turn() and cost.depth([drafted_seq(1, 100)], 1)[1]:
            tries.append(step)
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps == sorted(gaps) and 256 <= gaps[-1] <= 260


def test_a_step_that_was_held_up_does_not_count() -> None:
    cost = model_of({1: 1.0, 8: 1.05}, True, 0.05)
    for seconds in (1.0, 30.0, 1.0, 1.0):
        cost.stepped(8, seconds)
    assert depth(cost, 90) == 6


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("nonsense", "is not a JSON object"),
        ("[1]", "is not a JSON object"),
        ('{"method": "oracle"}', "is not one of ngram"),
        ('{"method": "ngram", "num_speculative_tokens": 99}', "must lie in"),
        ('{"method": "ngram", "lookup": 3}', "known keys are method"),
        ('{"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 3}', "prompt_lookup_min <="),
        ('{"method": "ngram", "model": "x"}', "no other takes it"),
        ('{"method": "draft_model"}', "needs it"),
        ('{"method": "self"}', "needs quantization"),
        ('{"method": "self", "layers": 1, "quantization": "int4"}', "needs quantization"),
        ('{"method": "ngram", "layers": 1}', "needs method self"),
    ],
)
def test_a_wrong_request_for_drafts_names_the_key(config: str, says: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config: .*" + says):
        parse_speculation(config, None, None)


def test_the_two_options_of_older_calls() -> None:
    old = parse_speculation(None, "folder", 3)
    assert old is not None and (old.method, old.model, old.tokens) == ("draft_model", "folder", 3)
    look_up = parse_speculation(None, "[ngram]", 5)
    assert look_up is not None and (look_up.method, look_up.model) == ("ngram", None)
    assert parse_speculation(None, None, None) is None and parse_speculation(None, None, 0) is None
    same = parse_speculation(json.dumps({"model": "folder", "num_speculative_tokens": 3}), None, None)
    assert same == old
    with pytest.raises(ConfigError, match="who drafts"):
        parse_speculation(None, None, 3)
    with pytest.raises(ConfigError, match="leave out"):
        parse_speculation("{}", "folder", 3)


def test_no_more_is_drafted_than_a_request_may_still_have() -> None:
    """The last token is drawn by the row before it: a guess at it would be computed for nothing."""
    engine, seq = drafted(16, 0)
    assert seq.request.params.max_tokens == 9
    for made in range(1, 9):
        assert len(seq.output) == made
        ready = undrafted(engine.scheduler)
        assert room_for_drafts(engine.scheduler, [(each, 20) for each in ready])[0] == [9 - made - 1]
        engine.scheduler.tables.trim(seq)
        engine.step()
    assert engine.ends["r", 0].finish_reason == "length"


def test_a_guess_takes_no_block_that_others_may_need_in_this_step() -> None:
    engine, seq = drafted(16, 0)
    others = [engine.pool.allocate() for _ in range(engine.pool.num_free - 1)]
    engine.scheduler.tables.trim(seq)
    assert len(seq.tokens) == 8 and len(seq.kv.blocks[0]) == 2 and engine.pool.num_free == 1
    assert room_for_drafts(engine.scheduler, [(seq, 4)])[0] == [0], "the one that is left is kept free"
    engine.pool.release(others.pop())
    assert room_for_drafts(engine.scheduler, [(seq, 4)])[0] == [4]
    for block in others:
        engine.pool.release(block)
    engine.scheduler.tables.trim(seq)
    engine.drain()
