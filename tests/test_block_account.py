"""The account of blocks: what is wrong with it is found, at once or in parts, and an idle engine holds nobody up."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cache import blocks
from quire.cache.blocks import BlockPool
from quire.engine.processes.worker import Worker
from quire.engine.stats import Stats


def account(lanes: int = 1) -> BlockPool:
    """A pool with blocks of every kind."""
    pool = BlockPool(24, lanes)
    held = [pool.allocate(i % lanes) for i in range(16)]
    for block in held[:10]:
        pool.publish(block, bytes([block]), [block])
    for block in (*held[4:8], *held[12:]):
        pool.release(block)
    pool.check()
    return pool


def ring(pool: BlockPool) -> None:
    """Two free blocks leave the list, and are each other's neighbours."""
    first = pool._next[pool.num_blocks]
    second = pool._next[first]
    after = pool._next[second]
    pool._next[pool.num_blocks], pool._prev[after] = after, pool.num_blocks
    pool._next[second], pool._prev[first] = first, second


def lost(pool: BlockPool) -> None:
    """A block leaves the free list, and nobody has it."""
    pool._unlink(pool._next[pool.num_blocks])


def set_at(name: str, index: int, value: object) -> Callable[[BlockPool], None]:
    """Write over a place of one of the account's tables."""

    def change(pool: BlockPool) -> None:
        getattr(pool, name)[index] = value

    return change


WRONG: dict[str, Callable[[BlockPool], None]] = {
    "an owner too many": set_at("refs", 4, 1),
    "no owner": set_at("refs", 0, 0),
    "fewer than no owner": set_at("refs", 20, -1),
    "a count": set_at("free", 0, 3),
    "a link forwards": set_at("_next", 20, 23),
    "a link backwards": set_at("_prev", 20, 23),
    "a link to itself": lambda pool: [set_at(name, 20, 20)(pool) for name in ("_next", "_prev")],
    "a link to nowhere": set_at("_next", 20, 99),
    "a link before the first": set_at("_prev", 20, -7),
    "the head": set_at("_next", 24, 0),
    "the tail": set_at("_prev", 24, 0),
    "a ring beside the list": ring,
    "a block that nobody has": lost,
    "another's key": set_at("_key", 3, b"other"),
    "a key lost": set_at("_key", 3, None),
    "a key that is none": set_at("_key", 15, b"other"),
    "an entry of another block": lambda pool: pool._by_key.update({bytes([2]): 3}),
    "an entry without a key": lambda pool: pool._by_key.update({b"other": 3}),
    "an entry lost": lambda pool: pool._by_key.pop(bytes([2])),
}


@pytest.mark.parametrize("name", WRONG)
def test_whatever_is_wrong_with_the_account_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, or while it is verified in parts from anywhere on."""
    pool = account()
    WRONG[name](pool)
    with pytest.raises(AssertionError):
        pool.check()
    for begun in range(3):
        pool = account()
        monkeypatch.setattr(blocks, "SLICE", 10)
        for _ in range(begun):
            pool.check_more()
        WRONG[name](pool)
        with pytest.raises(AssertionError):
            for _ in range(6):
                pool.check_more()


def test_a_block_in_the_list_of_another_lane_is_found() -> None:
    pool = account(2)
    block = next(block for block in range(24) if not pool.refs[block] and block % 2)
    pool._unlink(block)
    before = pool._prev[24]
    pool._next[before], pool._prev[block], pool._next[block], pool._prev[24] = block, before, 24, block
    pool._place[block] = 1 << 40
    pool.free[1] += 1
    with pytest.raises(AssertionError, match="lane"):
        pool.check()


def test_places_hold_in_any_history() -> None:
    rng, pool = random.Random(1), BlockPool(40, 2)
    held: list[int] = []
    for step in range(3000):
        lane = rng.randrange(2)
        if pool.free[lane] and rng.random() < 0.5:
            held.append(pool.allocate(lane))
            if rng.random() < 0.5:
                pool.publish(held[-1], step.to_bytes(4, "big"), [step])
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        if not step % 50:
            pool.check()


class Idle:
    """An engine without work, with an account to verify; what comes into its worker's inbox is `due`."""

    has_work, tiering = False, None

    def __init__(self, count: int) -> None:
        self.pool = BlockPool(count)
        self.unchecked, self.parts, self.turns = True, 0, 0

    def check(self, part: bool = False) -> None:
        if not part:
            self.pool.check()
        elif self.unchecked:
            self.unchecked, self.parts = self.pool.check_more(), self.parts + 1

    def stats(self) -> Stats:
        return Stats()

    def portable(self) -> tuple[str, ...]:
        return ()


def turned(engine: Idle, turns: int, due: Callable[[], bool]) -> None:
    """Turns of a worker's loop."""
    worker: Any = Worker.__new__(Worker)
    worker._trimmed = 0.0
    worker._turn, worker._left, worker.sent = threading.Lock(), False, []
    worker.send, worker.receive = worker.sent.append, lambda engine, timeout: []

    def poll(timeout: int) -> bool:
        worker._left = worker._left or len(worker.sent) >= turns
        return due()

    worker.inbox = SimpleNamespace(poll=poll)
    with pytest.raises(StopIteration):
        worker.loop(engine)


def test_an_idle_engine_verifies_its_account_once_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.processes.worker.time.sleep", lambda seconds: next(iter(())))
    counted, check = [0], BlockPool.check

    def whole(pool: BlockPool) -> None:
        counted[0] += 1
        check(pool)

    monkeypatch.setattr(BlockPool, "check", whole)
    engine = Idle(5000)
    turned(engine, 10, lambda: False)
    assert counted == [0], "not all at once, whatever comes meanwhile waits"
    assert not engine.unchecked and engine.parts == 5
    engine = Idle(5000)
    turned(engine, 3, lambda: True)
    assert engine.parts == 3, "a message is read before the next part"
