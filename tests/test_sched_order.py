"""Who gets what of a step: a long prompt keeps nobody out, and priorities hold in the batch as in the queue."""

from __future__ import annotations

from fake_runner import FakeEngine, request
from quire.core.sequence import Sequence
from quire.sched.shares import shares
from test_scheduler import assert_golden


def first_token(engine: FakeEngine, *names: str) -> list[str]:
    """The requests in the order of their first tokens."""
    order: list[str] = []
    while engine.scheduler.has_work:
        engine.step()
        order += [name for name in names if engine.outputs.get((name, 0)) and name not in order]
    return order


def prompt_of(length: int, computed: int = 0, draft: int = 0) -> Sequence:
    seq = Sequence(request("r", list(range(length)), 9))
    seq.computed, seq.draft = computed, [1] * draft
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
    decode, short, long = prompt_of(9, 8, draft=2), prompt_of(6), prompt_of(90)
    assert shares([long], 40, chunked=True, others=False) == {long: 40}
    assert shares([long], 40, chunked=True, others=True) == {long: 20}
    assert shares([long, short, decode], 40, chunked=True, others=False) == {decode: 3, short: 6, long: 31}
    assert shares([long, prompt_of(60)], 40, chunked=True, others=False)[long] == 20
    assert shares([long, decode], 3, chunked=True, others=True) == {decode: 3, long: 0}
    assert shares([long], 40, chunked=False, others=True) == {long: 0} and shares([short], 40, False, True) == {
        short: 6
    }


def test_the_newest_gives_its_blocks_back() -> None:
    engine = FakeEngine(num_blocks=9, block_size=4, max_model_len=30)
    for name in ("old", "newer", "newest"):
        engine.submit(request(name, [1, 2, 3], 25, eos=()))
    while not engine.scheduler.preemptions:
        engine.step()
    (waiting,) = engine.scheduler.waiting
    assert waiting.request.id == "newest"


def test_a_late_urgent_sequence_is_never_the_victim_of_less_urgent_ones() -> None:
    engine = FakeEngine(num_blocks=9, block_size=4, max_model_len=30, scheduling_policy="priority")
    for i in range(3):
        engine.submit(request(f"r{i}", [i, 2, 3], 25, eos=(), priority=1))
    engine.step()
    engine.submit(request("urgent", [7, 2, 3], 25, eos=(), priority=0))
    while ("urgent", 0) not in engine.ends:
        engine.step()
        urgent = engine.scheduler.requests.get("urgent", [])
        assert all(not seq.preemptions for seq in urgent)
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
