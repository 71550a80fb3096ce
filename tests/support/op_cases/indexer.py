"""Cases of the ops of `quire.ops.reference.indexer`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from op_cases.reference import rope_table
from op_cases.registry import cases
from op_cases.weights import normal
from quire.core.dtypes import BF16, F32
from quire.ops.indexer import BlockIndexer, Choice, IndexLayout, PooledIndexer
from quire.ops.lazy import torch_dtype
from quire.ops.op import Case
from quire.ops.reference.caches import allocate


def whole_numbers(g: Generator, *shape: int) -> Tensor:
    """Small ones, of which sums are exact in every format, and often the same."""
    return torch.randint(-2, 3, shape, generator=g).float()


@cases("index_rope_and_cache")
def index_rope_and_cache_cases(g: Generator) -> Iterator[Case]:
    for t, heads, d, r, size in ((1, 2, 16, 8, 16), (9, 3, 24, 24, 1), (40, 32, 128, 64, 16), (0, 1, 8, 4, 16)):
        for dtype in (BF16, F32):
            blocks = -(-t // size) + 2
            yield {
                "q": normal(g, t, heads * d),
                "k": normal(g, t, d),
                "positions": torch.randint(500, (t,), generator=g, dtype=torch.int32),
                "table": rope_table(500, r // 2),
                "slots": torch.randperm(blocks * size, generator=g)[:t],
                "cache": allocate(IndexLayout.of(size, d, dtype), blocks),
                "heads": heads,
            }


def index_case(
    g: Generator,
    layout: IndexLayout,
    heads: int,
    choice: Choice,
    rows: tuple[tuple[int, int], ...],
    exact: bool = True,
) -> Case:
    """A paged batch with (new rows, context) per sequence; blocks lie shuffled, unwritten slots are NaN."""
    size, blocks = layout.block_size, [-(-context // layout.block_size) for _, context in rows]
    cache = allocate(layout, sum(blocks) + 2)
    cache.keys.fill_(torch.nan)
    made = whole_numbers if exact else normal
    order = torch.randperm(sum(blocks) + 2, generator=g)
    tables = torch.full((len(rows), max(blocks) + 1), -1, dtype=torch.int32)
    used = 0
    for s, (_, context) in enumerate(rows):
        tables[s, : blocks[s]] = order[used : used + blocks[s]].int()
        used += blocks[s]
        at = torch.arange(context)
        cache.keys[tables[s, at // size].long(), at % size] = made(g, context, layout.head_dim).to(
            torch_dtype(layout.dtype)
        )
    counts = torch.tensor([0, *(new for new, _ in rows)])
    t = int(counts.sum())
    return {
        "q": made(g, t, heads * layout.head_dim // (1 if choice.pool == 1 else 2)),
        "weights": made(g, t, heads),
        "cache": cache,
        "cu_q": counts.cumsum(0).int(),
        "context": torch.tensor([context for _, context in rows], dtype=torch.int32),
        "block_tables": tables,
        "choice": choice,
    }


MIXED = ((1, 1), (1, 70), (5, 5), (0, 40), (17, 90), (1, 600))


@cases("choose_tokens")
def choose_tokens_cases(g: Generator) -> Iterator[Case]:
    for dtype in (BF16, F32):
        for size, heads, d, most in ((1, 4, 16, 8), (16, 33, 24, 64), (16, 64, 128, 7), (128, 1, 8, 1)):
            yield index_case(g, IndexLayout.of(size, d, dtype), heads, Choice(most), MIXED)
        yield index_case(g, IndexLayout.of(16, 64, dtype), 8, Choice(512), ((1, 1300), (40, 540)))
        for size, heads, d, most, pool in ((1, 4, 16, 2, 4), (16, 33, 48, 9, 3), (4, 8, 128, 3, 16), (16, 2, 16, 1, 2)):
            yield index_case(g, IndexLayout.of(size, d, dtype), heads, Choice(most, pool), MIXED)


@cases("pool_keys")
def pool_keys_cases(g: Generator) -> Iterator[Case]:
    for dtype in (BF16, F32):
        for size, d, pool in ((1, 16, 4), (16, 24, 3), (4, 128, 16), (16, 8, 2)):
            case = index_case(g, IndexLayout.of(size, 2 * d, dtype), 1, Choice(1, pool), MIXED, exact=False)
            tables, ends, slots = case["block_tables"], case["cu_q"].tolist(), list[Tensor]()
            for s, length in enumerate(case["context"].tolist()):
                at = torch.arange(length - (ends[s + 1] - ends[s]), length)
                slots.append(tables[s, at // size].long() * size + at % size)
            t = ends[-1]
            yield {
                "k": normal(g, t, d), "gates": 2 * normal(g, t, d), "bias": normal(g, pool, d),
                "slots": torch.cat(slots), "cache": case["cache"],
                "paged": (case["cu_q"], case["context"], tables),
            }  # fmt: skip


def block_case(
    g: Generator, layout: IndexLayout, heads: int, sizes: BlockIndexer, rows: tuple[tuple[int, int], ...]
) -> Case:
    """`index_case` of blocks."""
    case = index_case(g, layout, heads, Choice(1), rows)
    return {name: case[name] for name in ("q", "cache", "cu_q", "context", "block_tables")} | {"sizes": sizes}


@cases("choose_blocks")
def choose_blocks_cases(g: Generator) -> Iterator[Case]:
    for dtype in (BF16, F32):
        for size, heads, d, own in ((1, 2, 16, 4), (4, 1, 24, 4), (16, 4, 64, 64), (128, 33, 8, 128)):
            for most, local in ((1, 1), (3, 1), (5, 2)):
                yield block_case(g, IndexLayout.of(size, d, dtype), heads, BlockIndexer(d, own, most, local), MIXED)
        yield block_case(g, IndexLayout.of(16, 64, dtype), 4, BlockIndexer(64, 128, 2, 1), ((1, 1300), (40, 540)))


@cases("choose_pooled")
def choose_pooled_cases(g: Generator) -> Iterator[Case]:
    for dtype in (BF16, F32):
        for size, heads, d, own in ((1, 2, 16, 4), (4, 1, 24, 4), (4, 33, 8, 16), (16, 4, 64, 16), (2, 8, 32, 8)):
            for most in (1, 3, 9):
                case = index_case(g, IndexLayout.of(size, d, dtype), heads, Choice(1), MIXED)
                kept = {name: case[name] for name in ("q", "cache", "cu_q", "context", "block_tables")}
                yield kept | {"sizes": PooledIndexer(heads, d, own, most)}
        case = index_case(g, IndexLayout.of(4, 64, dtype), 4, Choice(1), ((1, 4099), (40, 540)))
        kept = {name: case[name] for name in ("q", "cache", "cu_q", "context", "block_tables")}
        yield kept | {"sizes": PooledIndexer(4, 64, 4, 200)}
