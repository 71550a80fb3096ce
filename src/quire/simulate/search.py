"""How many replicas hold a target: simulations by bisection, each of which is told."""

from __future__ import annotations

from collections.abc import Callable


def fewest(holds: Callable[[int], bool], most: int) -> int | None:
    """The least number up to `most` that holds, if more hold whatever fewer do; None where `most` does not.

    Doubles from 1 until one holds, then halves what is between.
    """
    low, high = 0, 1
    while not holds(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
