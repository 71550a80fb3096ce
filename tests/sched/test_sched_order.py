"""Who gets what of a step: a long prompt keeps nobody out, and priorities hold in the batch as in the queue."""

from __future__ import annotations

from functools import partial

import pytest
from msgspec.structs import replace

from fake_runner import FakeEngine, request
from quire.core.plan import Chunk, StepPlan
from quire.core.sequence import Sequence
from quire.sched.policy import CREDIT, Fair, Policy
from quire.sched.token_budget import LEAST, PrefillPace, divide_budget
from scheduler_histories import assert_golden
from turns import turns, working


def first_token(engine: FakeEngine, *names: str) -> list[str]:
    """The requests in the order of their first tokens."""
    order: list[str] = []
    for _ in working(engine.scheduler):
        engine.step()
        order += [name for name in names if engine.outputs.get((name, 0)) and name not in order]
    return order


def prompt_of(length: int, computed: int = 0, draft: int = 0) -> Sequence:
    seq = Sequence(request("r", list(range(length)), 9))
    seq.computed, seq.draft.tokens = computed, [1] * draft
    return seq


def test_a_long_prompt_keeps_nobody_out() -> None:
    engine = FakeEngine(96, 4, 80, max_num_batched_tokens=8)
    requests = [request("long", list(range(70)), 2), *(request(f"r{i}", [9, i, 3], 2) for i in range(3))]
    for each in requests:
        engine.submit(each)
        engine.step()
    assert engine.outputs.get(("r0", 0)), "it began while the long one was being computed"
    assert first_token(engine, "r0", "r1", "r2", "long")[-1] == "long"
    assert_golden(engine, requests)


def test_one_alone_gets_the_whole_step_and_two_share_it() -> None:
    decode, short, long, waits = prompt_of(9, 8, draft=2), prompt_of(6), prompt_of(90), prompt_of(50)
    alike = partial(divide_budget, urgency=Policy().urgency)
    assert alike([long], 40, True, None) == {long: 40}
    assert alike([long], 40, True, waits) == {long: 20}
    assert alike([long, short, decode], 40, True, None) == {decode: 3, short: 6, long: 31}
    assert alike([long, prompt_of(60)], 40, True, None)[long] == 20
    assert alike([long, decode], 3, True, waits) == {decode: 3, long: 0}
    assert alike([long], 40, False, waits) == {long: 0} and alike([short], 40, False, waits) == {short: 6}


def test_an_urgent_prompt_goes_before_a_short_one_and_leaves_nothing_undone() -> None:
    """Also one that waits: what is less urgent gets what it leaves; decodes go on in any case."""
    short, long, decode, waits = prompt_of(6), prompt_of(90), prompt_of(9, 8), prompt_of(30)
    urgency = {short: 2.0, long: 1.0, waits: 0.5, decode: 9.0}.__getitem__
    assert divide_budget([short, long], 40, True, None, urgency) == {long: 40, short: 0}
    assert divide_budget([short, long], 94, True, None, urgency) == {long: 90, short: 4}
    assert divide_budget([short, decode, long], 40, True, waits, urgency) == {decode: 1, long: 9, short: 0}


def test_the_newest_gives_its_blocks_back() -> None:
    engine = FakeEngine(num_blocks=9, block_size=4, max_model_len=30)
    for name in ("old", "newer", "newest"):
        engine.submit(request(name, [1, 2, 3], 25, eos=()))
    for _ in turns(lambda: not engine.scheduler.preemptions):
        engine.step()
    (waiting,) = engine.scheduler.waiting
    assert waiting.request.id == "newest"


def test_a_late_urgent_sequence_is_never_the_victim_of_less_urgent_ones() -> None:
    engine = FakeEngine(num_blocks=9, block_size=4, max_model_len=30, scheduling_policy="priority")
    for i in range(3):
        engine.submit(request(f"r{i}", [i, 2, 3], 25, eos=(), priority=1))
    engine.step()
    engine.submit(request("urgent", [7, 2, 3], 25, eos=(), priority=0))
    for _ in turns(lambda: ("urgent", 0) not in engine.ends):
        engine.step()
        urgent = engine.scheduler.requests.get("urgent", [])
        assert all(not seq.times.preemptions for seq in urgent)
    assert engine.scheduler.preemptions and len(engine.ends) == 1


def test_an_urgent_request_takes_the_place_of_a_less_urgent_one() -> None:
    for limits, blocks in (({"max_num_seqs": 2}, 64), ({}, 7)):
        engine = FakeEngine(blocks, 4, 30, scheduling_policy="priority", **limits)
        requests = [request(f"r{i}", [i, *range(8)], 12, eos=(), priority=1 + i) for i in range(2)]
        for each in requests:
            engine.submit(each)
        for _ in range(4):
            engine.step()
        urgent = request("urgent", [7, *range(8)], 4, eos=(), priority=0)
        engine.submit(urgent)
        engine.step()
        assert [seq.request.id for seq in engine.scheduler.waiting] == ["r1"], "the least urgent one waits"
        engine.drain()
        assert_golden(engine, [*requests, urgent])
        assert engine.scheduler.preemptions


def test_equals_do_not_displace_each_other() -> None:
    engine = FakeEngine(64, 4, 30, scheduling_policy="priority", max_num_seqs=1)
    for name in "ab":
        engine.submit(request(name, [1, 2, 3], 9, eos=(), priority=3))
    assert first_token(engine, "a", "b") == ["a", "b"] and not engine.scheduler.preemptions


def tenant(engine: FakeEngine, name: str, who: str, weight: float = 1.0, tokens: int = 12) -> None:
    asked = request(name, [len(who), 3, 5, 7], tokens, eos=())
    engine.submit(replace(asked, tenant=who, weight=weight))


def served(engine: FakeEngine, who: str) -> int:
    """Tokens that the requests of a tenant gave so far."""
    return sum(len(tokens) for (name, _), tokens in engine.outputs.items() if name.startswith(who))


def test_tenants_are_served_by_their_weight_whatever_they_ask_for() -> None:
    for weight in (1.0, 3.0):
        engine = FakeEngine(256, 4, 40, scheduling_policy="fair", max_num_seqs=8, max_num_batched_tokens=16)
        for i in range(200):
            tenant(engine, f"flood{i}", "flood")
            if i < 100:
                tenant(engine, f"calm{i}", "calm", weight)
        for _ in range(200):
            engine.step()
        share = served(engine, "calm") / (served(engine, "calm") + served(engine, "flood"))
        assert abs(share - weight / (1 + weight)) < 0.05, share


def test_one_alone_is_served_as_if_there_were_no_tenants() -> None:
    """Work-conserving: no row is left out while anybody waits."""
    steps = []
    for policy in ("fcfs", "fair"):
        engine = FakeEngine(256, 4, 40, scheduling_policy=policy, max_num_seqs=8, max_num_batched_tokens=16)
        for i in range(30):
            tenant(engine, f"r{i}", "only")
        count = 0
        for _ in working(engine.scheduler):
            engine.step()
            count += 1
        steps.append(count)
    assert steps[0] == steps[1]


def test_who_comes_to_a_full_batch_gets_a_place_of_the_one_that_has_too_many() -> None:
    engine = FakeEngine(256, 4, 40, scheduling_policy="fair", max_num_seqs=4)
    for i in range(12):
        tenant(engine, f"flood{i}", "flood", tokens=30)
    for _ in range(5):
        engine.step()
    tenant(engine, "calm", "calm", tokens=3)
    for _ in range(2):
        engine.step()
    assert engine.outputs.get(("calm", 0)), "it did not wait for one of the others to end"
    engine.drain()
    assert len(engine.ends) == 13 and all(end.finish_reason == "length" for end in engine.ends.values())


def test_little_is_saved_up_in_a_pause_and_nothing_is_forgiven() -> None:
    policy = Fair()
    a, b = (replace(request(name, [1] * 3000, 9), tenant=name) for name in "ab")
    policy.joins(a)
    seq = Sequence(a)
    seq.computed = 3000
    policy.served(seq, 3000)
    policy.joins(b)
    policy.leaves(a)
    assert policy.counter("a") == 3002 and policy.counter("b") == 3002 - CREDIT
    policy.served(seq, 3000)
    policy.joins(a)
    assert policy.counter("a") == 6004, "ending its work for a moment forgives nothing"
    tokens = Sequence(replace(a, weight=5.0))
    tokens.computed = 3000
    policy.served(tokens, 3000)
    assert policy.counter("a") == pytest.approx(6004 + 3002 / 5)


def paced(pace: PrefillPace, row: float, prompt: int, steps: int) -> list[float]:
    """Seconds of steps beside two decodes of 30 ms, while a prompt of so many rows waits."""
    decodes = [Chunk(prompt_of(8, 9), 9, 1, 1) for _ in range(2)]
    for chunk in decodes:
        chunk.seq.prompt_len = 8
    waits, found = prompt_of(prompt), []
    for _ in range(steps):
        count = min(prompt, pace.budget(2, 512) - 2)
        prompt -= count
        chunks = (*decodes, Chunk(waits, 0, count, 0)) if count else tuple(decodes)
        found.append(0.03 + row * count)
        pace.learn(StepPlan(chunks=chunks), found[-1])
    return found


def test_chunks_are_as_large_as_the_time_between_tokens_allows() -> None:
    pace = PrefillPace(0.05)
    assert pace.budget(0, 512) == 512 and PrefillPace(0.0).budget(9, 512) == 512
    paced(pace, 0.002, 0, 5)
    quick = paced(pace, 0.001, 2000, 60)
    assert max(quick) < 0.051 and sum(quick[-20:]) / 20 > 0.045, "the time is used"
    slow = paced(pace, 0.004, 2000, 60)
    assert max(slow[3:]) < 0.055 and min(slow) > 0.04, "one step is too long, then they are smaller"
    late = PrefillPace(0.01)
    paced(late, 0.002, 0, 5)
    assert late.budget(2, 512) == 2 + LEAST, "prompts get on even where decodes alone take longer"


def test_a_paced_scheduler_serves_everybody() -> None:
    engine = FakeEngine(96, 4, 80, max_num_batched_tokens=32, target_itl_ms=0.001)
    requests = [request(f"r{i}", [i, *range(30)], 6) for i in range(4)]
    for each in requests:
        engine.submit(each)
    sizes = []
    for _ in working(engine.scheduler):
        waited = any(len(tokens) and key not in engine.ends for key, tokens in engine.outputs.items())
        plan, results = engine.launch()
        sizes += [plan.num_tokens] if waited else []
        for out in engine.scheduler.commit(plan, results()):
            engine.outputs.setdefault((out.request_id, out.index), []).extend(out.tokens)
            if out.finish_reason is not None:
                engine.ends[out.request_id, out.index] = out
    assert_golden(engine, requests)
    assert max(sizes) <= 4 + LEAST


def test_the_limit_of_a_sequence_is_its_requests_or_the_models() -> None:
    assert [Sequence(request("r", [1, 2, 3], 4), longest=longest).limit for longest in (20, 7, 6, 4)] == [7, 7, 6, 4]
    vector = replace(request("r", [1, 2, 3], 4), pooling="last")
    assert Sequence(vector, longest=3).limit == 4, "its only output takes no place"
