"""Snapshots of recurrent states in a store behind the cache: where sequences go on that find them there."""

from __future__ import annotations

import pytest

from fake_runner import golden, request
from quire.cache.blocks import is_state
from quire.cache.host import HostStore
from quire.core.request import Request
from storing_engine import SIZES, StoringEngine


def ask(engine: StoringEngine, req: Request) -> int:
    """How many tokens of its prompt were found, once its answer is right."""
    engine.submit(req)
    engine.drain()
    assert engine.outputs[req.id, 0] == golden(req, 0, engine.max_model_len)
    return engine.ends[req.id, 0].cached_tokens


@pytest.mark.parametrize("windows", [(0,), (0, 5)])
def test_another_engine_goes_on_behind_a_state_that_was_kept(windows: tuple[int, ...]) -> None:
    store, options = HostStore(1000, SIZES), {"windows": windows, "slots": 8, "interval": 8}
    first = StoringEngine(24 * len(windows), store=store, **options)
    assert ask(first, request("a", list(range(30)), 4)) == 0
    first.keep_all()
    second = StoringEngine(24 * len(windows), store=store, **options)
    assert ask(second, request("b", list(range(30)), 4)) == 28, "the prompt's last whole block"
    assert ask(second, request("c", [*range(23), 40, 41, 42], 4)) == 16, "the last snapshot before"
    assert ask(second, request("d", [*range(23), 43, 44, 45], 4)) == 20, "the end of what two share, kept by the last"
    assert second.behind.misses == 0 and second.states.pool is not None


def test_a_snapshot_that_was_evicted_comes_back_to_blocks_that_were_not() -> None:
    engine = StoringEngine(num_blocks=64, store=HostStore(1000, SIZES), slots=6, interval=40)
    for turn in range(3):
        for head in range(6):
            found = ask(engine, request(f"{turn}/{head}", [head, *range(29)], 2))
            assert found == (28 if turn else 0)
    assert engine.behind.hits, "slots are too few for all"


def test_blocks_without_a_state_are_worth_nothing() -> None:
    store, options = HostStore(1000, SIZES), {"slots": 8, "interval": 40}
    first = StoringEngine(24, store=store, **options)
    ask(first, request("a", list(range(30)), 4))
    first.keep_all()
    for key in [key for key in store._blocks if is_state(key)]:
        del store._blocks[key]
    second = StoringEngine(24, store=store, **options)
    assert ask(second, request("b", list(range(30)), 4)) == 0 and second.behind.hits == 0
