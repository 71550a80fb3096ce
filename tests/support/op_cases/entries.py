"""Cases of the ops of `quire.ops.reference.entries`, and of others over a cache of entries."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from op_cases.reference import rope_table
from op_cases.registry import cases
from op_cases.weights import normal
from quire.core.dtypes import BF16, F32, Dtype
from quire.ops.entries import EntryLayout, EntryReads, Pool
from quire.ops.indexer import Choice, IndexLayout
from quire.ops.layout import KVCache
from quire.ops.lazy import torch_dtype
from quire.ops.op import Case
from quire.ops.reference.caches import allocate

ROWS = ((1, 1), (1, 70), (5, 5), (0, 40), (17, 90), (1, 300))
"""New rows and context of each sequence."""


def tables_of(g: Generator, blocks: list[int], spare: int = 2) -> Tensor:
    """Shuffled blocks of each sequence, -1 behind them."""
    order, used = torch.randperm(sum(blocks) + spare, generator=g), 0
    found = torch.full((len(blocks), max(blocks) + 1), -1, dtype=torch.int32)
    for s, count in enumerate(blocks):
        found[s, :count] = order[used : used + count].int()
        used += count
    return found


def filled(g: Generator, layout: IndexLayout, blocks: int) -> KVCache:
    """A cache of random rows."""
    cache = allocate(layout, blocks)
    cache.keys.copy_(normal(g, *cache.keys.shape).to(torch_dtype(layout.dtype)))
    return cache


class EntryBatch:
    """The sequences `ROWS` over tables of tokens, and others of entries."""

    def __init__(self, g: Generator, size: int) -> None:
        needed = [-(-context // size) for _, context in ROWS]
        counts = torch.tensor([0, *(new for new, _ in ROWS)])
        self.blocks, self.rows = sum(needed) + 2, int(counts.sum())
        self.tables, self.lasting = tables_of(g, needed), tables_of(g, needed)
        self.context = torch.tensor([context for _, context in ROWS], dtype=torch.int32)
        self.paged = counts.cumsum(0).int(), self.context, self.tables
        at = [(s, context - new + i) for s, (new, context) in enumerate(ROWS) for i in range(new)]
        self.positions = [position for _, position in at]
        self.slots = torch.tensor([int(self.tables[s, p // size]) * size + p % size for s, p in at])


SIZES = ((16, 4, 2), (1, 4, 2), (16, 32, 1), (16, 16, 2), (4, 128, 1))
"""Tokens of a block and of an entry, and parts of a row."""


def dtypes() -> tuple[Dtype, ...]:
    """Of caches."""
    return BF16, F32


@cases("pool_entries")
def pool_cases(g: Generator) -> Iterator[Case]:
    for dtype in dtypes():
        for (size, every, series), d in zip(SIZES, (16, 32, 24, 128, 64), strict=True):
            batch = EntryBatch(g, size)
            yield {
                "x": normal(g, batch.rows, 2 * series * d),
                "slots": batch.slots,
                "rows": filled(g, IndexLayout.of(size, 2 * series * d, dtype), batch.blocks),
                "entries": filled(g, EntryLayout.of_tokens(size, d, dtype, every), batch.blocks),
                "paged": batch.paged,
                "tables": batch.lasting,
                "pool": Pool(normal(g, every, series * d), normal(g, d), 1e-6, rope_table(512, 4), series),
            }


@cases("entry_attention")
def attention_cases(g: Generator) -> Iterator[Case]:
    for dtype in dtypes():
        for (size, every, _), (heads, d, window, most) in zip(
            SIZES, ((4, 16, 5, 3), (33, 32, 12, 0), (1, 64, 128, 0), (64, 128, 1, 7), (5, 48, 70, 1)), strict=True
        ):
            batch = EntryBatch(g, size)
            chosen = chosen_entries(g, batch.positions, every, most) if most else None
            sinks = normal(g, heads) if heads > 4 else None
            yield {
                "q": normal(g, batch.rows, heads * d),
                "cache": filled(g, IndexLayout.of(size, d, dtype), batch.blocks),
                "entries": filled(g, EntryLayout.of_tokens(size, d, dtype, every), batch.blocks),
                "paged": batch.paged,
                "tables": batch.lasting,
                "reads": EntryReads(d**-0.5, window, sinks, chosen),
            }
        batch = EntryBatch(g, 16)
        yield {
            "q": normal(g, batch.rows, 3 * 16), "cache": filled(g, IndexLayout.of(16, 16, dtype), batch.blocks),
            "entries": None, "paged": batch.paged, "tables": batch.tables, "reads": EntryReads(0.25, 9),
        }  # fmt: skip


def chosen_entries(g: Generator, positions: list[int], every: int, most: int) -> Tensor:
    """Random ones for each row, ascending, and -1 behind them: int32 [T, most]."""
    found = torch.full((len(positions), most), -1, dtype=torch.int32)
    for row, position in enumerate(positions):
        picked = torch.randperm((position + 1) // every, generator=g)[:most].sort().values
        found[row, : len(picked)] = picked.int()
    return found


def choosing_case(g: Generator, layout: EntryLayout, heads: int, most: int) -> Case:
    """`choose_tokens` of entries, whose scores are exact and often the same."""
    batch, d = EntryBatch(g, layout.block_size), layout.head_dim
    cache = allocate(layout, batch.blocks)
    cache.keys.copy_(torch.randint(-2, 3, cache.keys.shape, generator=g).to(cache.keys.dtype))
    cu_q, context, _ = batch.paged
    return {
        "q": torch.randint(-2, 3, (batch.rows, heads * d), generator=g).float(),
        "weights": torch.randint(-2, 3, (batch.rows, heads), generator=g).float(),
        "cache": cache,
        "cu_q": cu_q,
        "context": context,
        "block_tables": batch.lasting,
        "choice": Choice(most),
    }
