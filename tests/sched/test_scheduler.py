"""T11. Pool, prefix cache, block tables and scheduler: invariants after every step, outputs as if run alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from fake_runner import FakeEngine, golden, next_token, request
from quire.cache.blocks import BlockPool
from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.core.plan import Chunk, ChunkResult
from quire.core.request import Output, Request, TokenLogprob
from quire.core.sequence import Sequence
from quire.sched.growth import append
from scheduler_histories import COMMON, ENGINES, Machine, assert_golden
from turns import turns, working


@pytest.mark.sampled(5)
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("budget", [4, 7, 64])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("windows", [(0,), (5,), (0, 5), (5, 0, 9)])
def test_outputs_do_not_depend_on_anything(
    block_size: int, budget: int, prefix: bool, windows: tuple[int, ...]
) -> None:
    blocks = 64 * len(windows) // block_size
    engine = FakeEngine(blocks, block_size, 48, windows, prefix, max_num_batched_tokens=budget)
    requests = [request(f"r{i}", [1, 2, 3, 4, 5, 6, 7, 8, 9, i % 3][: 3 + i], 5 + 3 * i, n=1 + i % 3) for i in range(8)]
    for req in requests:
        engine.submit(req)
    engine.drain()
    assert_golden(engine, requests)


def test_preemption_happens_and_changes_nothing() -> None:
    engine = FakeEngine(num_blocks=9, block_size=4, max_model_len=30)
    requests = [request(f"r{i}", [i, 2, 3], 25, eos=()) for i in range(4)]
    for req in requests:
        engine.submit(req)
    engine.drain()
    assert engine.scheduler.preemptions > 0
    assert_golden(engine, requests)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("blocks", [16, 96])
def test_a_step_ahead_changes_no_output(blocks: int, late: bool) -> None:
    engine = FakeEngine(blocks, 4, 48, ahead=True, late=late, max_num_batched_tokens=16)
    requests = [request(f"r{i}", [i % 3, *range(2 + 3 * i)], 3 + 5 * (i % 4), n=1 + i % 3) for i in range(9)]
    for req in requests:
        engine.submit(req)
    engine.drain()
    assert_golden(engine, requests)
    assert engine.steps_ahead > 20
    assert (engine.scheduler.preemptions > 0) == (blocks == 16)


def test_no_row_is_planned_past_a_known_end() -> None:
    engine = FakeEngine(64, 4, 12, ahead=True)
    engine.submit(request("short", [1, 2], 3, eos=()))
    engine.submit(request("longest", [3, 4], 40, eos=()))
    rows = []
    for _ in working(engine.scheduler):
        engine.step()
        rows.append(engine._launched[0].num_tokens if engine._launched else None)
    # The prompts, then a row each until one has its three tokens, the other the twelve that a sequence may have.
    assert rows == [2, 2, *[1] * 7, 0]


def test_an_end_token_and_an_abort_throw_the_row_ahead_away() -> None:
    engine = FakeEngine(64, 4, 48, ahead=True, late=True)
    last = next_token([1, 2], 0)
    engine.submit(request("ends", [1, 2], 20, eos=(last,)))
    engine.submit(request("aborted", [3, 3, 3], 20, eos=()))
    engine.step()
    assert engine.outputs["ends", 0] == [last] and engine.ends["ends", 0].finish_reason == "stop"
    assert engine._launched is not None and engine._launched[0].num_tokens == 2, "a row of each is under way"
    engine.scheduler.abort("aborted")
    assert engine.pool.num_used == 0 and not engine.scheduler.has_work
    engine.outputs.clear()
    other = request("aborted", [5], 4)
    engine.submit(other)
    engine.drain()
    assert_golden(engine, [other])


def test_a_block_is_published_only_when_its_last_row_is_known_to_be_finite() -> None:
    engine = FakeEngine(64, 4, 48, ahead=True, late=True)
    engine.submit(request("bad", [1, 2, 3], 20, eos=()))
    for _ in turns(lambda: engine._launched is None or engine._launched[0].chunks[0].start != 7):
        engine.step()
    engine.poison.add("bad")  # the row that fills the second block is under way, and its logits will not be numbers
    engine.drain()
    tokens = [1, 2, 3, *engine.outputs["bad", 0]]
    assert len(tokens) == 8 and engine.ends["bad", 0].finish_reason == "error"
    engine.submit(request("after", [*tokens, 5], 2))
    engine.drain()
    assert engine.ends["after", 0].cached_tokens == 4


def test_prefix_is_shared_and_salted() -> None:
    engine = FakeEngine(num_blocks=32)
    prompt = list(range(10, 30))
    for name, salt, hit in (("cold", "", 0), ("warm", "", 19), ("other", "tenant", 0), ("again", "tenant", 19)):
        engine.submit(request(name, prompt, 2, salt=salt))
        engine.drain()
        assert engine.ends[name, 0].cached_tokens == hit


def test_a_lookup_is_counted_once_however_long_a_request_waits() -> None:
    engine = FakeEngine(num_blocks=8, block_size=4, max_model_len=32)
    for name in ("first", "second"):
        engine.submit(request(name, [ord(name[0]), *range(18)], 10, eos=()))
    engine.drain()
    assert engine.scheduler.preemptions == 0 and engine.prefix is not None
    assert (engine.prefix.queries, engine.prefix.hits) == (2 * 19, 0)


def test_forks_share_the_prompt() -> None:
    engine = FakeEngine(num_blocks=32, block_size=4, max_num_batched_tokens=64)
    engine.submit(request("r", list(range(14)), 4, n=4, eos=()))
    engine.step()
    engine.step()
    # 3 full blocks shared, and one private copy of the partial block for each of the four.
    assert engine.pool.num_used == 3 + 4
    engine.drain()


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_one_of_n_is_aborted_and_its_blocks_are_free(steps: int) -> None:
    engine = FakeEngine(64, 4, 48)
    req = request("r", [1, 2, 3, 4, 5, 6], 30, n=3, eos=())
    engine.submit(req)
    for _ in range(steps):
        engine.step()
    used = engine.pool.num_used
    engine.scheduler.abort("r", 0)
    engine.scheduler.abort("r", 0)
    engine.pool.check()
    assert engine.pool.num_used < used or steps < 4
    engine.drain()
    for index in (1, 2):
        assert engine.outputs[req.id, index] == golden(req, index, 48)
    engine.submit(req)
    for index in range(3):
        engine.scheduler.abort("r", index)
    assert not engine.scheduler.has_work and not engine.scheduler.requests and not engine.pool.num_used


def test_decodes_come_before_prefill() -> None:
    engine = FakeEngine(max_num_batched_tokens=6, num_blocks=32)
    engine.submit(request("short", [1], 30, eos=()))
    engine.step()
    engine.submit(request("long", list(range(30)), 2))
    for _ in turns(lambda: ("long", 0) not in engine.ends):
        before = len(engine.outputs["short", 0])
        engine.step()
        assert len(engine.outputs["short", 0]) == before + 1
    engine.drain()


def test_priority_order() -> None:
    engine = FakeEngine(scheduling_policy="priority", max_num_seqs=1)
    for name, priority in (("low", 5), ("high", -1), ("mid", 0)):
        engine.submit(request(name, [1, 2], 2, priority=priority))
    engine.drain()
    assert [name for name, _ in engine.ends] == ["high", "mid", "low"]


def test_a_numeric_error_ends_only_its_request_and_is_not_published() -> None:
    engine = FakeEngine(num_blocks=32)
    engine.poison.add("bad")
    good = request("good", [1, 2, 3, 4, 5, 6], 6)
    engine.submit(good)
    engine.submit(request("bad", list(range(20, 32)), 6, n=2))
    engine.drain()
    assert_golden(engine, [good])
    assert {engine.ends["bad", i].finish_reason for i in range(2)} == {"error"}
    engine.poison.clear()
    engine.submit(request("after", list(range(20, 32)), 2))
    engine.drain()
    assert engine.ends["after", 0].cached_tokens == 0


def test_refusals_name_the_reason() -> None:
    engine = FakeEngine(num_blocks=4, block_size=4, max_model_len=48)
    with pytest.raises(BadRequest, match="KV cache holds 16"):
        engine.submit(request("big", [1] * 16, 4))
    with pytest.raises(BadRequest, match="takes 1 to 47"):
        engine.submit(request("long", [1] * 48, 4))
    with pytest.raises(BadRequest, match="takes 1 to 47"):
        engine.submit(request("empty", [], 4))
    engine.submit(request("r", [1] * 15, 40, eos=()))
    with pytest.raises(BadRequest, match="in use"):
        engine.submit(request("r", [1], 4))
    engine.drain()
    assert len(engine.outputs["r", 0]) == 2, "a sequence that outgrows the pool ends by length with what it has"
    assert engine.ends["r", 0].finish_reason == "length"


def test_static_batching_waits_for_the_whole_batch() -> None:
    engine = FakeEngine(static_batching=True, max_num_batched_tokens=32, num_blocks=64)
    requests = [request(f"r{i}", [i, 1], 3 + i, eos=()) for i in range(6)]
    for req in requests:
        engine.submit(req)
    sizes = []
    for _ in working(engine.scheduler):
        engine.step()
        sizes.append(len(engine.scheduler.running))
    assert_golden(engine, requests)
    assert 4 in sizes and all(b <= a or a == 0 for a, b in itertools.pairwise(sizes))


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, **COMMON)
TestMachine = Machine.TestCase


@pytest.mark.slow
class TestMachineLong(Machine.TestCase):  # type: ignore[name-defined,misc]
    """The same machine over many more histories."""

    settings = settings(max_examples=5000, stateful_step_count=200, **COMMON)


class DraftingMachine(Machine):
    """Every engine guesses tokens ahead: the budget cuts drafts, preemption and aborts meet them halfway."""

    @initialize(form=st.fixed_dictionaries(ENGINES | {"drafts": st.integers(0, 2**32)}))
    def start(self, form: dict[str, Any]) -> None:
        """Build an engine that drafts."""
        super().start(form)


@pytest.mark.slow
class TestManyDrafts(DraftingMachine.TestCase):  # type: ignore[name-defined,misc]
    """50,000 histories."""

    settings = settings(max_examples=50_000, stateful_step_count=20, **COMMON)


@given(st.lists(st.tuples(st.sampled_from("apfr"), st.integers(0, 30)), max_size=200))
@settings(max_examples=200, deadline=None)
def test_pool_alone(operations: list[tuple[str, int]]) -> None:
    """Allocation, publishing, sharing and release in any order keep free + used = total."""
    pool, held = BlockPool(8), []
    for kind, value in operations:
        if kind == "a" and pool.num_free:
            held.append(pool.allocate())
        elif kind == "p" and held:
            pool.publish(held[value % len(held)], bytes([value]), [value])
        elif kind == "f":
            block = pool.find(bytes([value]), [value])
            if block is not None:
                pool.acquire(block)
                held.append(block)
        elif kind == "r" and held:
            pool.release(held.pop(value % len(held)))
        pool.check()
        assert pool.num_used == len(set(held))


def test_a_sibling_that_computes_the_prompt_again_scores_nothing() -> None:
    """With windows the last row of every chunk has logits, and so a score, whoever wanted it."""
    wanted = Request(id="r", prompt=(1, 2, 3), params=SamplingParams(n=2, prompt_logprobs=0), seed=0, arrival=0.0)
    for index in (0, 1):
        seq, output = Sequence(wanted, index), Output(request_id="r", index=index)
        for start, found in ((0, ([], [TokenLogprob(2, -1.0, 1), TokenLogprob(3, -1.0, 1)])), (2, ([7], []))):
            tokens, scores = found
            append(Chunk(seq, start, 1, 1), ChunkResult(tokens, [], scores), output, 0.0)
        assert output.tokens == [7]
        assert output.prompt_logprobs is None if index else len(output.prompt_logprobs or ()) == 2
