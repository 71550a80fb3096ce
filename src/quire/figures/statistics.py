"""Medians of rounds, how sure they are, and whether two configurations differ.

Intervals of medians are those of order statistics (Conover, Practical Nonparametric Statistics), which assume no
distribution; a ratio of interleaved rounds is the median of the rounds' ratios with the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.figures.schema import Interval

LEVEL = 0.95


def median(values: Sequence[float]) -> float:
    """Median of at least one value."""
    return float(np.median(values))


def interval(values: Sequence[float]) -> Interval:
    """The narrowest symmetric pair of order statistics that holds the median with 95 %; the ends where none does.

    Fewer than 6 rounds cannot give 95 %: then it is the range of what was seen.
    """
    ordered, n = sorted(values), len(values)
    below, k = 0.5**n, 0
    while 1 - 2 * (following := below + math.comb(n, k + 1) * 0.5**n) >= LEVEL:
        below, k = following, k + 1
    return Interval(ordered[k], ordered[n - 1 - k])


@dataclass(frozen=True)
class Comparison:
    """Comparison of A to B: the median ratio, its interval, and whether 1 is outside of it and there were rounds
    enough."""

    ratio: float
    interval: Interval
    significant: bool


def compare(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """Rounds of A and B. Equally many are taken as interleaved: round i of A with round i of B; else all pairs."""
    pairs = zip(a, b, strict=True) if len(a) == len(b) else ((x, y) for x in a for y in b)
    ratios = [x / y for x, y in pairs if y]
    if not ratios:
        return Comparison(math.nan, Interval(math.nan, math.nan), False)
    if len(a) == len(b):
        found = interval(ratios)
    else:  # pairs that share rounds say less than so many rounds: the ends of both medians' intervals
        (low, high), (least, most) = ((i.low, i.high) for i in (interval(a), interval(b)))
        found = Interval(low / most if most else math.nan, high / least if least else math.nan)
    enough = min(len(a), len(b)) >= 6
    return Comparison(median(ratios), found, enough and not found.low <= 1 <= found.high)
