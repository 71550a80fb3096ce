"""Cases of the ops of `quire.ops.reference.ngrams`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from op_cases.registry import cases
from op_cases.weights import normal
from quire.ops.ngrams import DIGITS, NgramHash
from quire.ops.op import Case


def digits_of(tokens: Tensor) -> Tensor:
    """Of numbers plus 1, -1 for no token: f32 [..., 3]."""
    return torch.stack([(tokens + 1) >> 8 * i & 255 for i in range(DIGITS)], -1).float()


@cases("ngram_rows")
def ngram_cases(g: Generator) -> Iterator[Case]:
    for t, n, heads, vocab in ((0, 3, 4, 99), (1, 2, 1, 9), (40, 3, 16, 250_000), (9, 4, 6, 70_000), (300, 3, 2, 12)):
        tokens = torch.randint(0, vocab, (t,), generator=g, dtype=torch.int32)
        before = torch.randint(-1, vocab, (t, n - 1), generator=g)
        before[torch.rand(before.shape, generator=g) < 0.2] = 2
        columns = torch.cat((digits_of(before).flatten(1), torch.zeros(t, 5)), 1)
        factors = torch.randint(1, ((1 << 63) - 1) // vocab, (n,), generator=g)
        sizes = torch.randint(1, 1000, (heads,), generator=g)
        tables = torch.stack((sizes, sizes.cumsum(0) - sizes))
        yield {"tokens": tokens, "before": columns, "by": NgramHash(factors, tables, 2)}


@cases("gate_values")
def gate_cases(g: Generator) -> Iterator[Case]:
    for t, h, streams in ((0, 8, 2), (1, 64, 4), (7, 33, 3), (2, 5, 1)):
        yield {"key": normal(g, t, streams * h), "query": normal(g, t, streams * h), "value": normal(g, t, h)}
    yield {"key": torch.zeros(3, 32), "query": normal(g, 3, 32), "value": normal(g, 3, 16)}
