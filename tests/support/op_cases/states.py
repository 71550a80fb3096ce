"""Cases of the ops of `quire.ops.reference.states`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator

from op_cases.reference import attention_case
from op_cases.registry import cases
from op_cases.weights import normal
from quire.core.dtypes import F8, F32, I8
from quire.core.parallel import SPLIT
from quire.core.windows import first_seen
from quire.ops.layout import KVLayout
from quire.ops.op import Case
from quire.ops.reference.caches import allocate


def states_case(g: Generator, layout: KVLayout, heads: int, rows: tuple[tuple[int, int], ...], lanes: int = 1,
                window: int = 0, extras: str = "") -> Case:  # fmt: skip
    """`attention_case`, of which the first of `lanes` holders has every so many-th split."""
    case = attention_case(g, layout, heads, rows, window, extras=extras)
    tables, counts = case["block_tables"], [0]
    for s, (new, context) in enumerate(rows):
        for block in range(-(-context // layout.block_size)):
            if block * layout.block_size // max(SPLIT, layout.block_size) % lanes:
                tables[s, block] = -1
        for end in range(context - new + 1, context + 1):
            seen = range(first_seen(window, end - 1) // SPLIT, -(-end // SPLIT))
            counts.append(sum(int(tables[s, split * SPLIT // layout.block_size]) >= 0 for split in seen))
    return case | {"starts": torch.tensor(counts).cumsum(0)}


@cases("fold_states")
def fold_states_cases(g: Generator) -> Iterator[Case]:
    for t, heads, d, most in ((1, 1, 8, 1), (3, 4, 64, 5), (70, 2, 80, 3), (2, 3, 24, 40), (1, 2, 512, 2)):
        for sinks in (None, normal(g, heads) * 3):
            counts = torch.randint(1, most + 1, (t,), generator=g)
            total = int(counts.sum())
            states = normal(g, total + 3, heads, d + 2) * 4
            states[..., 1] = 1 + states[..., 1].abs()
            yield {
                "states": states.flatten(1),
                "starts": torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))),
                "order": torch.randperm(total + 3, generator=g)[:total],
                "heads": heads,
                "sinks": sinks,
            }


@cases("cache_rows")
def cache_rows_cases(g: Generator) -> Iterator[Case]:
    for dtype in (F32, I8, F8):
        for size, kv_heads, d, t in ((16, 2, 64, 40), (1, 1, 24, 3), (64, 3, 8, 9)):
            layout = KVLayout(size, kv_heads, d, dtype)
            slots = torch.randperm(t * size, generator=g)[:t]
            slots[::3] = -1
            yield {"kv": normal(g, t, 2 * kv_heads * d), "slots": slots, "cache": allocate(layout, t)}
