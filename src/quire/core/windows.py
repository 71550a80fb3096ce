"""Windows: which of the tokens before it a row of attention sees, its own always among them.

A window is a number. n > 0: the last n tokens (sliding window, Beltagy et al. 2020). n < 0: those of its own chunk of
-n tokens, which follow each other from the sequence's first (chunked attention, Meta AI 2025: Llama 4). 0: all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Position = TypeVar("Position", int, NDArray[np.int64])


def first_seen(window: int, position: Position) -> Position:
    """The first position that a row at `position` sees, or those of rows at several int64."""
    if window < 0:
        return position - position % -window
    first = position - window + 1
    return first * (first > 0) if window else position * 0


def most_seen(window: int) -> int:
    """Tokens that a row sees at most; 0: all."""
    return abs(window)


def widest(windows: Iterable[int]) -> int:
    """The least window that has whatever any of `windows` has, or 0."""
    kinds = set(windows)
    if len(kinds) == 1:
        return kinds.pop()
    return max(kinds) if kinds and min(kinds) > 0 else 0


def pairs(window: int, first: int, rows: int) -> float:
    """Row and key pairs of `rows` rows that follow each other from position `first` on."""
    if window < 0:
        return _chunked_pairs(-window, first + rows) - _chunked_pairs(-window, first)
    growing = max(0, min(rows, window - first - 1)) if window else rows
    return growing * (2 * (first + 1) + growing - 1) / 2 + (rows - growing) * window


def _chunked_pairs(chunk: int, rows: int) -> float:
    """Pairs of the first `rows` rows of a sequence."""
    whole, rest = divmod(rows, chunk)
    return whole * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2
