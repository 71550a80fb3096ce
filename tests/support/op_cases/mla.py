"""Cases of the ops of `quire.ops.reference.latents`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Generator, Tensor

from op_cases.reference import rope_table
from op_cases.registry import cases
from op_cases.weights import normal
from quire.core.dtypes import BF16, F32
from quire.core.windows import first_seen
from quire.ops.experts import padded_rows
from quire.ops.indexer import Choice
from quire.ops.latents import EPS, LatentHeads, LatentLayout, LatentReads
from quire.ops.layout import KVCache, SharedLayout, carved
from quire.ops.lazy import torch_dtype
from quire.ops.op import Case
from quire.ops.reference.caches import allocate
from quire.ops.weights import Weight


def head_matrices(g: Generator, kind: str, heads: int, n: int, k: int) -> Weight:
    """Random matrices of all heads as `head_linear` wants them."""
    codes = normal(g, heads, n, k)[:, padded_rows(n)].flatten(0, 1)
    return Weight(kind, codes if kind == "f32" else codes.bfloat16())


@cases("head_linear")
def head_linear_cases(g: Generator) -> Iterator[Case]:
    for kind in ("f32", "bf16"):
        for t, heads, width, n, k in ((1, 1, 16, 16, 16), (3, 4, 24, 20, 16), (70, 3, 33, 64, 33), (0, 2, 8, 8, 8)):
            w = head_matrices(g, kind, heads, n, k)
            yield {"x": normal(g, t, heads * width), "w": w, "heads": heads, "n": n}


@cases("latent_rope_and_cache")
def latent_rope_and_cache_cases(g: Generator) -> Iterator[Case]:
    for t, heads, width, rank, r, size in ((1, 2, 24, 16, 8, 16), (9, 3, 12, 32, 12, 1), (40, 16, 192, 512, 64, 16),
                                          (5, 3, 24, 32, 0, 16)):  # fmt: skip
        for dtype in (BF16, F32):
            layout = LatentLayout(size, 1, r, dtype, rank=rank)
            blocks = -(-t // size) + 2
            yield {
                "q": normal(g, t, heads * width),
                "kv": normal(g, t, rank + r),
                "positions": torch.randint(500, (t,), generator=g, dtype=torch.int32),
                "table": rope_table(500, r // 2),
                "slots": torch.randperm(blocks * size, generator=g)[:t],
                "cache": allocate(layout, blocks),
                "heads": LatentHeads(heads, normal(g, rank), 1e-5 if dtype == F32 else EPS),
            }


def latent_case(
    g: Generator, layout: LatentLayout, heads: int, width: int, rows: tuple[tuple[int, int], ...], sinks: bool = False,
    window: int = 0,
) -> Case:  # fmt: skip
    """A paged batch with (new rows, context) per sequence; blocks lie shuffled, unwritten slots are NaN, and blocks
    before all windows none of the pool's."""
    size, blocks = layout.block_size, [-(-context // layout.block_size) for _, context in rows]
    cache = allocate(layout, sum(blocks) + 2)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    order = torch.randperm(sum(blocks) + 2, generator=g)
    tables = torch.full((len(rows), max(blocks) + 1), -1, dtype=torch.int32)
    used = 0
    for s, (_, context) in enumerate(rows):
        tables[s, : blocks[s]] = order[used : used + blocks[s]].int()
        used += blocks[s]
        at = torch.arange(context)
        where = tables[s, at // size].long(), at % size
        cache.keys[where] = normal(g, context, layout.head_dim).to(torch_dtype(layout.dtype))
        cache.values[where] = normal(g, context, layout.rank).to(torch_dtype(layout.dtype))
        tables[s, : first_seen(window, context - rows[s][0]) // size] = -1
    counts = torch.tensor([0, *(new for new, _ in rows)])
    t = int(counts.sum())
    sink = normal(g, heads) * 3 if sinks else None
    return {
        "latent": normal(g, t, heads * layout.rank),
        "q": normal(g, t, heads * width),
        "cache": cache,
        "cu_q": counts.cumsum(0).int(),
        "context": torch.tensor([context for _, context in rows], dtype=torch.int32),
        "block_tables": tables,
        "reads": LatentReads((layout.rank + layout.head_dim) ** -0.5, sinks=sink, window=window),
    }


def chosen_tokens(g: Generator, case: Case, most: int) -> Tensor:
    """Random ones for each row of a latent case, as `choose_tokens` gives them: int32 [T, most]."""
    ends, rows = case["cu_q"].tolist(), list[Tensor]()
    for s, length in enumerate(case["context"].tolist()):
        for seen in range(length - (ends[s + 1] - ends[s]) + 1, length + 1):
            own = torch.randperm(seen, generator=g)[:most].sort().values
            rows.append(torch.cat((own, torch.full((most - len(own),), -1))))
    return torch.stack(rows).int()


def chosen_pools(g: Generator, case: Case, choice: Choice) -> Tensor:
    """Random pools for each row, and tokens behind them, as `choose_tokens` gives them: int32 [T, n]."""
    ends, rows = case["cu_q"].tolist(), list[Tensor]()
    for s, length in enumerate(case["context"].tolist()):
        for seen in range(length - (ends[s + 1] - ends[s]) + 1, length + 1):
            whole = seen // choice.pool
            own = torch.randperm(whole, generator=g)[: choice.most].sort().values
            own = (own[:, None] * choice.pool + torch.arange(choice.pool)).flatten()
            own = torch.cat((own, torch.arange(whole * choice.pool, seen)))
            rows.append(torch.cat((own, torch.full((choice.width - len(own),), -1))))
    return torch.stack(rows).int()


def reading(case: Case, chosen: Tensor) -> Case:
    """`case` of rows that read `chosen` tokens alone."""
    return case | {"reads": replace(case["reads"], chosen=chosen)}


def beside_others(cache: KVCache) -> tuple[KVCache, tuple[Tensor, Tensor]]:
    """What `cache` holds in blocks that others have bytes of, 8 of each token before it and 24 behind it, which are all
    ones: NaN in any format; and these bytes."""
    layout, before, behind = cache.layout, 8, 24
    with cache.keys.device:
        shared = SharedLayout.of(layout.block_size, before + layout.bytes_per_token + behind)
        whole = allocate(shared, len(cache.keys))
    whole.keys.fill_(255)
    found = carved(whole, layout, before * layout.block_size)
    found.keys.copy_(cache.keys)
    found.values.copy_(cache.values)
    rows = whole.keys.view(len(cache.keys), -1, layout.block_size)
    return found, (rows[:, :before], rows[:, -behind:])


@cases("latent_attention")
def latent_attention_cases(g: Generator) -> Iterator[Case]:
    mixed = ((1, 1), (1, 70), (5, 5), (0, 40), (17, 90), (1, 600))
    for dtype in (BF16, F32):
        for size, heads, rank, r in ((1, 4, 16, 8), (16, 4, 32, 8), (16, 40, 64, 32), (128, 1, 16, 6)):
            yield latent_case(g, LatentLayout(size, 1, r, dtype, rank=rank), heads, r + 8, mixed)
        layout = LatentLayout(16, 1, 64, dtype, rank=512)
        yield latent_case(g, layout, 16, 192, ((1, 1300), (40, 540)))
        for heads, most, sinks in ((4, 20, False), (40, 520, False), (4, 20, True), (40, 520, True)):
            case = latent_case(g, LatentLayout(16, 1, 8, dtype, rank=32), heads, 16, (*mixed, (2, 900)), sinks)
            yield reading(case, chosen_tokens(g, case, most))
        for pool, most in ((3, 2), (16, 40)):  # of a model that turns nothing
            case = latent_case(g, LatentLayout(16, 1, 0, dtype, rank=32), 4, 16, (*mixed, (2, 900)))
            yield case | {"reads": replace(case["reads"], chosen=chosen_pools(g, case, Choice(most, pool)), pool=pool)}
        for size, heads in ((16, 4), (1, 40)):
            case = latent_case(g, LatentLayout(size, 1, 8, dtype, rank=32), heads, 16, mixed, sinks=True)
            yield case
        for size, heads, window, sinks in (
            (16, 4, 5, False),
            (1, 40, 70, True),
            (16, 40, 300, False),
            (16, 4, -64, True),
        ):
            layout = LatentLayout(size, 1, 8, dtype, rank=32)
            yield latent_case(g, layout, heads, 16, (*mixed, (40, 1100), (3, 514)), sinks, window)
        for sink in (-1e4, 1e4):  # one that weighs nothing, and one beside which tokens do not
            yield case | {"reads": replace(case["reads"], sinks=torch.full((40,), sink))}
