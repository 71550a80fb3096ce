"""Which tokens windows and chunks let rows see."""

from __future__ import annotations

import numpy as np
import pytest

from quire.cache.groups import LayerGroups, TableSizes, group_layers
from quire.core.dtypes import BF16
from quire.core.windows import first_seen, most_seen, pairs, widest
from quire.model.mixers.mixer import LayerCacheSpec
from quire.ops.layout import KVLayout


@pytest.mark.parametrize("window", [0, 1, 5, -1, -5])
def test_what_rows_see_adds_up_to_pairs(window: int) -> None:
    seen = [position - first_seen(window, position) + 1 for position in range(40)]
    assert max(seen) == (most_seen(window) or 40)
    several = np.arange(40)
    assert (several - first_seen(window, several) + 1).tolist() == seen
    for first in range(40):
        for last in range(first, 40):
            assert pairs(window, first, last - first) == sum(seen[first:last])


def test_chunks_follow_each_other_from_the_first_token() -> None:
    assert [first_seen(-4, position) for position in range(9)] == [0, 0, 0, 0, 4, 4, 4, 4, 8]
    assert [first_seen(4, position) for position in range(6)] == [0, 0, 0, 0, 1, 2]


def test_the_least_window_of_several() -> None:
    assert widest([5, 9]) == 9 and widest([5, 0]) == 0
    assert widest([-8, -8]) == -8 and widest([-8, -16]) == 0 and widest([-8, 8]) == 0


def test_tables_of_chunked_layers_keep_their_chunk_alone() -> None:
    layout = KVLayout(16, 1, 16, BF16)
    parts = {layer: LayerCacheSpec((layout,), 0 if layer % 4 == 3 else -64) for layer in range(8)}
    groups = group_layers(parts, 1000)
    assert set(groups.windows) == {0, -64} and group_layers(parts, 64) == LayerGroups((0,), (tuple(range(8)),))
    sizes = TableSizes(16, 32, (-64,))
    assert [sizes.kept(tokens, -64) for tokens in (1, 64, 65, 80, 81, 128, 129)] == [1, 4, 1, 1, 2, 4, 1]
    assert sizes.most(1000, -64) == 7
