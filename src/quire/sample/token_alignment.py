"""Which rows of an encoder's output each token of a text belongs to: dynamic time warping of attention.

As openai/whisper does (whisper/timing.py): the attention of each head is normed over the tokens and smoothed by a
median over `MEDIAN` rows, the heads are added up, and of all ways that only go forward the likeliest is taken (Sakoe
and Chiba 1978).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

MEDIAN = 7
"""Rows of an encoder's output, 0.02 s each, of which the median is taken."""
F32s = NDArray[np.float32]


def mean_attention(scores: Iterable[F32s]) -> F32s:
    """Scores [tokens, rows] of each head in turn -> the mean [tokens, rows] of their attention, normed and smoothed."""
    total, count = np.zeros((1, 1), np.float32), 0
    for each in scores:
        weights = np.exp(each - each.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        spread = weights.std(axis=0, keepdims=True)
        weights -= weights.mean(axis=0, keepdims=True)
        np.divide(weights, spread, out=weights, where=spread > 0)
        total, count = total + smoothed(weights), count + 1
    return total / np.float32(max(1, count))


def smoothed(weights: F32s) -> F32s:
    """The median of `MEDIAN` neighbours along each of weights [n, rows], which are mirrored at both ends."""
    reach = MEDIAN // 2
    if weights.shape[1] <= reach:
        return weights
    padded = np.pad(weights, ((0, 0), (reach, reach)), mode="reflect")
    made = np.empty_like(weights)
    for i, row in enumerate(np.lib.stride_tricks.sliding_window_view(padded, MEDIAN, axis=1)):
        made[i] = np.partition(row, reach, axis=1)[:, reach]
    return made


def first_rows(likeness: F32s) -> NDArray[np.int32]:
    """The row where each token begins, int32 [tokens], on the way of most likeness [tokens, rows] through all of both.

    Costs are added up diagonal by diagonal: those of one need only the two before it.
    """
    tokens, rows = likeness.shape
    cost = np.full((tokens + 1, rows + 1), np.inf, np.float32)
    cost[0, 0] = 0
    steps = np.empty((tokens + 1, rows + 1), np.int8)
    steps[0, :], steps[:, 0] = 2, 1
    distance = -likeness.astype(np.float64)
    for diagonal in range(2, tokens + rows + 1):
        i = np.arange(max(1, diagonal - rows), min(tokens, diagonal - 1) + 1)
        j = diagonal - i
        both, token, row = cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1]
        step = np.where((both < token) & (both < row), 0, np.where((token < both) & (token < row), 1, 2))
        cost[i, j] = distance[i - 1, j - 1] + np.choose(step, (both, token, row))
        steps[i, j] = step
    starts = np.zeros(tokens, np.int32)
    i, j = tokens, rows
    while i > 0:
        starts[i - 1] = j - 1
        step = steps[i, j]
        i, j = i - (step != 2), j - (step != 1)
    return starts
