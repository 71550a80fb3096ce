"""Attention of an encoder with relative positions (Raffel et al. 2020): by torch, in f32, a sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.ops.arrays import Array, is_tensor, to_torch

QUERIES = 256
"""Rows of scores at a time."""


def everything_seen(bias: Any, n: int, head_dim: int) -> Callable[[Any], Tensor]:
    """Attention of sequences of `n` tokens that all see each other, by a backend's arrays: `attend_all`."""
    sliding = _sliding(_tensor(bias), n)
    return lambda qkv: attend_all(_tensor(qkv), sliding, head_dim)


def _tensor(x: Any) -> Tensor:
    found: Tensor = x if is_tensor(x) else to_torch(x)
    return found


def _sliding(bias: Array, n: int) -> Array:
    """bias [heads, 2 f + 1] as a view [heads, n, n] for queries from the last to the first, and all keys."""
    furthest = bias.shape[1] // 2
    after = torch.arange(1 - n, n, device=bias.device).clamp(-furthest, furthest)
    return bias[:, after + furthest].unfold(1, n, 1)


def attend_all(qkv: Array, bias: Array, head_dim: int) -> Array:
    """softmax(q k^T + bias) v where everything is seen: qkv [n, 3 heads head_dim] -> [n, heads head_dim] of its dtype.

    `bias` [heads, n, n] is for queries from the last to the first: one row is then the row before moved by one key, so
    that it is a view of a vector per head instead of n^2 numbers.
    """
    n = len(qkv)
    q, k, v = qkv.float().view(n, 3, -1, head_dim).permute(1, 2, 0, 3)
    q, keys = q.flip(1), k.transpose(1, 2)
    out = qkv.new_empty((n, q.shape[0], head_dim))
    for first in range(0, n, QUERIES):
        rows = slice(first, first + QUERIES)
        scores = (q[:, rows] @ keys).add_(bias[:, rows])
        out[rows] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out.flip(0).view(n, -1)
