"""The definitions of ops of embeddings of n-grams (Qwen4-Exp)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.ngrams import DIGITS, NgramHash
from quire.ops.op import op


@op(tolerance=0.0)
def ngram_rows(tokens: Tensor, before: Tensor, by: NgramHash) -> Tensor:
    """Rows of a table that the n-grams up to each token name, for each of `by.heads` places: int32 [T * heads].

    tokens [T] int32. `before` [T, c] f32: of each of the n - 1 tokens before, the nearest first, the three digits of
    its number plus 1 to the base 256, the lowest first; zeros where there is none. The place of the last k tokens is
    t_0 f_0 ^ t_1 f_1 ^ ... ^ t_k-1 f_k-1, t_i the token i before the last, modulo the rows of its table.
    """
    n, ends = by.tokens, torch.full_like(tokens, by.end, dtype=torch.int64)
    each, (sizes, firsts) = by.heads // (n - 1), by.tables
    mixed, cut, found = tokens.long() * by.factors[0], torch.zeros_like(tokens, dtype=torch.bool), []
    for back in range(1, n):
        low, middle, high = before[:, DIGITS * (back - 1) : DIGITS * back].long().unbind(1)
        token = low + 256 * middle + 65536 * high - 1
        cut = cut | (token < 0) | (token == by.end)
        mixed = mixed ^ (torch.where(cut, ends, token) * by.factors[back])
        own = slice((back - 1) * each, back * each)
        found.append(mixed[:, None] % sizes[own] + firsts[own])
    return torch.cat(found, 1).flatten().int()


@op(tolerance=2e-5)
def gate_values(key: Tensor, query: Tensor, value: Tensor) -> Tensor:
    """The value of a row for each of its streams, gated: f32 [T, n * h] of value [T, h] f32.

    key, query [T, n * h] f32. The gate of a stream is the sigmoid of the root of the product of its key and query by
    sqrt(h), with the product's sign; products closer to 0 than 1e-6 count as 1e-6.
    """
    h = value.shape[1]
    product = (key * query).view(len(key), key.shape[1] // h, h).sum(-1, keepdim=True) * h**-0.5
    depth = product.abs().clamp(min=1e-6).sqrt() * product.sign()
    gated: Tensor = depth.sigmoid() * value[:, None]
    return gated.flatten(1)
