"""A sequence whose blocks are all that a pool has."""

from __future__ import annotations

import pytest

from fake_runner import FakeEngine, request
from quire.core.sequence import Sequence


@pytest.mark.parametrize(("blocks", "found"), [(4, 0), (5, 3)])
def test_all_blocks_of_a_pool_are_no_prefix_as_the_last_one_could_not_be_copied(blocks: int, found: int) -> None:
    engine = FakeEngine(num_blocks=blocks, block_size=1)
    tables, first, second = engine.scheduler.tables, *(Sequence(request(name, [1, 2, 3, 4], 4)) for name in "ab")
    assert tables.reserve(first, 4, [])
    first.computed = 4
    tables.publish(first, 4)
    tables.release(first)
    tables.take_prefix(second)
    assert second.computed == found and tables.reserve(second, 4, [])
    tables.release(second)
    engine.pool.check()
