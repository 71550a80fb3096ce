"""Cases of the op of `quire.ops.reference.convolution`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator

from op_cases.registry import cases
from op_cases.weights import normal
from quire.core.dtypes import BF16, F16, F32
from quire.ops.convolution import Convolution, RowLayout
from quire.ops.op import Case
from quire.ops.reference.caches import allocate, write

MIXED = ((1, 1), (1, 70), (5, 5), (0, 40), (37, 90), (1, 2), (3, 4))


def convolution_case(
    g: Generator, layout: RowLayout, conv: Convolution, rows: tuple[tuple[int, int], ...], padding: int = 0
) -> Case:
    """A paged batch with (new rows, context) per sequence; blocks lie shuffled, rows not yet written are NaN.

    `padding`: rows behind the last sequence, which fill the step.
    """
    size, n = layout.block_size, layout.width
    blocks = [-(-context // size) for _, context in rows]
    cache = allocate(layout, sum(blocks) + 2)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    order = torch.randperm(sum(blocks) + 2, generator=g)
    tables = torch.full((len(rows), max(blocks, default=0) + 1), -1, dtype=torch.int32)
    used, slots = 0, []
    for s, (new, context) in enumerate(rows):
        tables[s, : blocks[s]] = order[used : used + blocks[s]].int()
        used += blocks[s]
        at = torch.arange(context)
        where = tables[s, at // size].long() * size + at % size
        past = normal(g, context - new, 1, n)
        write(cache, where[: context - new], past[..., : n // 2], past[..., n // 2 :])
        slots.append(where[context - new :])
    slots.append(torch.full((padding,), -1))
    counts = torch.tensor([0, *(new for new, _ in rows)])
    return {
        "x": normal(g, int(counts.sum()) + padding, n * (3 if conv.gated else 1)),
        "cache": cache,
        "slots": torch.cat(slots),
        "paged": (counts.cumsum(0).int(), torch.tensor([c for _, c in rows], dtype=torch.int32), tables),
        "conv": conv,
    }


@cases("causal_conv")
def convolution_cases(g: Generator) -> Iterator[Case]:
    for taps, n, size, dtype, activation, bias, gated in (
        (3, 64, 16, BF16, "", False, True),
        (3, 48, 1, F32, "", False, True),
        (3, 1032, 16, F16, "", True, True),
        (4, 64, 16, F32, "silu", True, False),
        (4, 600, 4, BF16, "silu", False, False),
        (2, 8, 2, F32, "", True, False),
        (1, 16, 8, BF16, "silu", True, True),
        (8, 72, 1, F32, "", False, False),
    ):
        conv = Convolution(normal(g, taps, n), normal(g, n) if bias else None, activation, gated)
        yield convolution_case(g, RowLayout.of(size, n, dtype), conv, MIXED, padding=taps % 3)
    conv = Convolution(normal(g, 3, 32), gated=True)
    layout = RowLayout.of(16, 32, F32)
    yield convolution_case(g, layout, conv, ((0, 3),))
    drafted = convolution_case(g, layout, conv, ((2, 20), (6, 40), (5, 5)))
    # second: a row, then a draft of five: 0, 1 and 2 after 0, 3, 4 after 2; third: a draft of three behind two rows
    masks = [0, 0, 0, 0b1, 0b11, 0b101, 0b1000, 0b10101, 0, 0, 0b1, 0b10, 0b110]
    yield drafted | {"tree": torch.tensor(masks)}
