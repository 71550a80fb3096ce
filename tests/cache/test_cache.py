"""The block pool and the prefix cache by themselves: what a hash may not decide, who is evicted, what is wiped."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from fake_runner import FakeEngine, request
from quire.cache import prefix
from quire.cache.blocks import BlockPool
from scheduler_histories import assert_golden


def colliding(data: bytes, **options: Any) -> Any:
    """A hash of one value for everything."""
    return hashlib.blake2b(b"", digest_size=options["digest_size"])


def test_tokens_are_compared_after_a_hit() -> None:
    pool = BlockPool(4)
    block = pool.allocate()
    assert pool.publish(block, b"key", [1, 2, 3, 4])
    assert pool.find(b"key", [1, 2, 3, 4]) == block
    for others in ([1, 2, 3, 5], [1, 2, 3], []):
        assert pool.find(b"key", others) is None
    assert pool.find(b"other", [1, 2, 3, 4]) is None


@pytest.mark.parametrize("windows", [(0,), (5,), (0, 5)])
def test_prompts_whose_hashes_collide_are_told_apart(windows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is equal, as those of a crafted collision would be; the engine that pretends sees each wrong value."""
    monkeypatch.setattr(prefix, "hashlib", SimpleNamespace(blake2b=colliding))
    engine = FakeEngine(64, 4, 48, windows)
    requests = [request(f"r{i}", [i % 3] * 4 + list(range(9)), 4) for i in range(6)]
    for each in requests:
        engine.submit(each)
        engine.drain()
    assert_golden(engine, requests)
    assert engine.pool.num_cached == 1 if windows != (0, 5) else 2, "one key, for each group of layers"
    assert engine.ends["r3", 0].cached_tokens == 4


def test_a_name_of_an_adapter_and_a_salt_do_not_imitate_each_other() -> None:
    engine, prompt = FakeEngine(num_blocks=64, max_num_batched_tokens=32), list(range(17))
    for i, (adapter, salt) in enumerate((("", ""), ("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""))):
        for again, hit in ((0, 0), (1, 16)):
            engine.submit(replace(request(f"{i} {again}", prompt, 2, salt=salt), adapter=adapter))
            engine.drain()
            assert engine.ends[f"{i} {again}", 0].cached_tokens == hit, (adapter, salt)


def test_blocks_are_taken_in_the_order_of_their_worth() -> None:
    """Those that hold nothing first, then what was found least recently."""
    pool = BlockPool(5)
    held = [pool.allocate() for _ in range(5)]
    for block in held[:3]:
        pool.publish(block, bytes([block]), [block])
    for block in (1, 3, 0, 4, 2):
        pool.release(block)
    pool.acquire(1)
    pool.release(1)
    assert {pool.allocate(), pool.allocate()} == {3, 4}
    assert [pool.allocate() for _ in range(3)] == [0, 2, 1]
    assert pool.num_cached == 0
    with pytest.raises(IndexError):
        pool.allocate()
    with pytest.raises(ValueError, match="block 2 has no owner"):
        for _ in range(2):
            pool.release(2)


def test_of_equal_blocks_one_is_published() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    assert pool.publish(first, b"key", [1]) and not pool.publish(second, b"key", [1])
    assert not pool.publish(first, b"another", [1]), "it has a name"
    assert not pool.writable(first) and pool.writable(second)
    pool.acquire(second)
    assert not pool.writable(second)


@pytest.mark.parametrize("ahead", [False, True])
def test_blocks_of_a_request_that_failed_are_wiped_before_reuse(ahead: bool) -> None:
    """The plan after the failure says so, and what the failed request had shared with others stays."""
    engine = FakeEngine(64, 4, 48, ahead=ahead)
    stem = list(range(20, 28))
    engine.submit(request("good", [*stem, 3], 20, eos=()))
    for _ in range(3):
        engine.step()
    engine.poison.add("bad")
    engine.submit(request("bad", [*stem, *range(14)], 6, eos=()))
    owned: set[int] = set()
    while ("bad", 0) not in engine.ends:
        assert engine.scheduler.requests["bad"] and len(engine.outputs["good", 0]) < 15
        for seq in engine.scheduler.requests["bad"]:
            owned |= {block for table in seq.kv.blocks for block in table if engine.pool.refs[block] == 1}
        engine.step()
    scrub = set(engine.scheduler.block_work.wipes)
    assert owned and owned <= scrub
    (good,) = engine.scheduler.requests["good"]
    assert not scrub & set(good.kv.blocks[0])
    engine.drain()
    assert ("nan",) not in engine.cache.values()


def test_of_a_sequence_that_left_the_beginning_is_kept_longest() -> None:
    """A later block of a chain is useless without the earlier ones."""
    engine = FakeEngine(num_blocks=8, block_size=4, max_num_batched_tokens=32)
    stem = list(range(20, 36))
    engine.submit(request("first", [*stem, 1], 1, eos=()))
    engine.drain()
    engine.submit(request("other", [*range(21)], 1, eos=()))  # takes six of eight blocks: two of the first's four stay
    engine.drain()
    engine.submit(request("again", [*stem, 1], 1, eos=()))
    engine.drain()
    assert engine.ends["again", 0].cached_tokens == 8


def test_tokens_that_a_preempted_request_finds_again_were_not_cached_for_it() -> None:
    engine = FakeEngine(num_blocks=9, block_size=4, max_model_len=30)
    requests = [request(f"r{i}", [i, 2, 3], 25, eos=()) for i in range(4)]
    for each in requests:
        engine.submit(each)
    engine.drain()
    assert engine.scheduler.preemptions and engine.prefix is not None and engine.prefix.hits
    assert {end.cached_tokens for end in engine.ends.values()} == {0}
    assert_golden(engine, requests)
