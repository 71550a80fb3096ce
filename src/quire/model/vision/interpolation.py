"""A table of numbers stretched over another size: by two neighbours a side, or by four (cubic convolution, Keys 1981).

The bits are those of torch's `interpolate` on processors that multiply and add in one step: which products are rounded,
and the order of sums, are its kernels'. A table [rows, columns, n] f32 becomes [lines, across, n] f32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32, F64

Floats = NDArray[np.float32]
Places = NDArray[np.int64]
HALF = np.float32(0.5)
BY_LINES = 128
"""Lines and columns together up to which torch weighs four neighbours at once however the table lies."""


def bilinear(table: Floats, lines: int, across: int, corners: bool) -> Floats:
    """Each number from the four around its place; `corners`: those of both sizes meet, else the borders do."""
    (above, below, down), (left, right, along) = (
        _neighbours(side, count, corners) for side, count in zip(table.shape, (lines, across), strict=False)
    )
    by_lines = not table.flags.c_contiguous and lines + across > BY_LINES
    weigh = _lines_then_columns if by_lines else _all_four
    found = np.empty((lines, across, table.shape[2]), F32)
    for line in range(lines):
        upper, lower = table[above[line]], table[below[line]]
        around = upper[left], upper[right], lower[left], lower[right]
        found[line] = weigh(around, down[line], along[:, None])
    return found


def bicubic(table: Floats, lines: int, across: int) -> Floats:
    """Each number from the sixteen around its place, those beyond the borders being what is at the borders."""
    (rows, down), (columns, along) = (
        _four(side, count) for side, count in zip(table.shape, (lines, across), strict=False)
    )
    found = np.empty((lines, across, table.shape[2]), F32)
    for line in range(lines):
        found[line] = _weighed(
            [_weighed([table[row][at] for at in columns], [w[:, None] for w in along]) for row in rows[:, line]],
            down[:, line],
        )
    return found


def antialiased(table: Floats, lines: int, across: int) -> Floats:
    """Each number from those around its place, weighed by their distance: over two numbers of the table or, where it is
    shrunk, of the result."""
    columns = _weighed_sides(table.swapaxes(0, 1), across).swapaxes(0, 1)
    return _weighed_sides(columns, lines)


def _weighed_sides(table: Floats, count: int) -> Floats:
    """`count` sums along the first axis, in ascending order."""
    side, step = len(table), np.float32(len(table)) / np.float32(count)
    reach = np.maximum(step, np.float32(1))
    middle = step * (np.arange(count, dtype=F32) + HALF)
    first = np.maximum((middle - reach + HALF).astype(np.int64), 0)
    last = np.minimum((middle + reach + HALF).astype(np.int64), side)
    places = first[:, None] + np.arange(int((last - first).max()))
    weights = np.maximum(1 - np.abs((places.astype(F32) - middle[:, None] + HALF) / reach), 0)
    weights = np.where(places < last[:, None], weights, np.float32(0)).astype(F32)
    weights /= weights.sum(1, keepdims=True)
    found = np.zeros((count, *table.shape[1:]), F32)
    for at, weight in zip(np.minimum(places, side - 1).T, weights.T, strict=True):
        found += weight[:, None, None] * table[at]
    return found


def _neighbours(side: int, count: int, corners: bool) -> tuple[Places, Places, Floats]:
    """Neighbours of each of `count` places among `side` numbers: the one before, the one behind, and the share of the
    latter."""
    places = np.arange(count, dtype=F32)
    if corners:
        real = np.float32(side - 1) / np.float32(max(count - 1, 1)) * places
    else:
        real = np.maximum(_from_borders(side, count), np.float32(0))
    before = np.minimum(real.astype(np.int64), side - 1)
    return before, np.minimum(before + 1, side - 1), np.clip(real - before.astype(F32), 0, 1)


def _four(side: int, count: int) -> tuple[Places, Floats]:
    """Four neighbours of each of `count` places among `side` numbers: the four around it, and their weights [4,
    count]."""
    real = _from_borders(side, count)
    low = np.floor(real)
    share = np.clip(real - low, 0, 1)
    rest = 1 - share
    weights = np.stack((_farther(share + 1), _nearer(share), _nearer(rest), _farther(rest + 1)))
    return np.clip(low.astype(np.int64) + np.arange(-1, 3)[:, None], 0, side - 1), weights


def _from_borders(side: int, count: int) -> Floats:
    """Where the middles of `count` equal parts are among `side` numbers, each in the middle of its own part."""
    return _plus(np.float32(side) / np.float32(count), np.arange(count, dtype=F32) + HALF, -HALF)


def _nearer(x: Floats) -> Floats:
    """The weight of a number at the distance 0 <= x <= 1: 1.25 x^3 - 2.25 x^2 + 1."""
    return _plus(np.float32(1.25), x, np.float32(-2.25)) * x * x + 1


def _farther(x: Floats) -> Floats:
    """The weight of a number at the distance 1 <= x <= 2: -0.75 x^3 + 3.75 x^2 - 6 x + 3."""
    return _plus(_plus(np.float32(-0.75), x, np.float32(3.75)), x, np.float32(-6)) * x + 3


def _all_four(around: tuple[Floats, ...], down: np.float32, along: Floats) -> Floats:
    up, first = 1 - down, 1 - along
    upper = _plus(down * along, around[3], down * first * around[2])
    return _plus(up * first, around[0], _plus(up * along, around[1], upper))


def _lines_then_columns(around: tuple[Floats, ...], down: np.float32, along: Floats) -> Floats:
    first = 1 - along
    upper, lower = (_plus(first, a, along * b) for a, b in (around[:2], around[2:]))
    return _plus(1 - down, upper, down * lower)


def _weighed(numbers: Sequence[Floats], weights: Sequence[Floats] | Floats) -> Floats:
    """The weighted sum of four."""
    total = _plus(weights[0], numbers[0], weights[1] * numbers[1])
    return _plus(weights[3], numbers[3], _plus(weights[2], numbers[2], total))


def _plus(x: Floats | np.float32, y: Floats, z: Floats | np.float32) -> Floats:
    """x * y + z, rounded once: products of two f32 are exact in f64."""
    found: Floats = (np.multiply(x, y, dtype=F64) + z).astype(F32)
    return found
