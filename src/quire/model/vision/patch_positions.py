"""Where the patches of an image are: their order, learned positions, rotations by row and column, windows.

Rows of a tile come in squares of `merge` x `merge` patches, line by line of squares and line by line within one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32, F64
from quire.model.families.rope import Rope
from quire.model.tower_sizes import Patches
from quire.model.vision.interpolation import Floats, antialiased, bicubic, bilinear
from quire.ops.arrays import concat

Places = NDArray[np.int64]
Groups = tuple[Places, ...]
"""Rows [groups, rows of each] that see each other, groups of one size together; each row is in one group."""


def cut(pixels: Any, patches: Patches) -> Any:
    """pixels [tiles, height, width, 3] to patches [rows, frames * size * size * 3], in the order of rows.

    What is left of a line or column of patches is left out. `ValueError` where squares of patches do not fit.
    """
    tiles, size, merge = len(pixels), patches.size, patches.merge
    rows, columns = pixels.shape[1] // size, pixels.shape[2] // size
    if not rows or not columns or rows % merge or columns % merge:
        raise ValueError(f"{rows} x {columns} patches are not squares of {merge} x {merge}")
    whole = pixels[:, : rows * size, : columns * size]
    grid = whole.reshape(tiles, rows // merge, merge, size, columns // merge, merge, size, 3)
    by_square = grid.swapaxes(2, 4).swapaxes(3, 4).swapaxes(4, 5)
    found = by_square.reshape(tiles * rows * columns, size * size * 3)
    return concat([found] * patches.frames, 1) if patches.frames > 1 else found


def order(rows: int, columns: int, merge: int) -> tuple[Places, Places]:
    """Line and column [rows * columns] int64 of each patch, in the order of rows."""
    squares = (rows // merge, merge, columns // merge, merge)
    row, column = (t.reshape(squares).swapaxes(1, 2).reshape(-1) for t in np.indices((rows, columns)))
    return row, column


def _same(grid: Floats, rows: int, columns: int) -> Floats:
    if grid.shape[:2] != (rows, columns):
        have, want = f"{rows} x {columns}", f"{grid.shape[0]} x {grid.shape[1]}"
        raise ValueError(f"the image has {have} patches, the tower has positions of {want}")
    return grid


def _between(stretch: Callable[[Floats, int, int], Floats]) -> Callable[[Floats, int, int], Floats]:
    """The table stretched over the image, itself where the sizes are the same."""

    def found(grid: Floats, rows: int, columns: int) -> Floats:
        return grid if grid.shape[:2] == (rows, columns) else stretch(grid, rows, columns)

    return found


def _buckets(grid: Floats, rows: int, columns: int) -> Floats:
    """The position that has the patch's place in its share of the table (NaViT, Dehghani et al. 2023).

    In f32 as the models were trained: at a border other roundings would choose the neighbour.
    """

    def bucket(count: int, side: int) -> Places:
        places = np.arange(count, dtype=F32) * (np.float32(1) / np.float32(count))
        return np.searchsorted(borders_of(side), np.minimum(places, np.float32(1.0 - 1e-6)), side="right")

    return grid[bucket(rows, grid.shape[0])][:, bucket(columns, grid.shape[1])]


def borders_of(side: int) -> Floats:
    """Between `side` equal parts of 1, as torch's `arange` counts on the machines that train models.

    Numbers of an eight are counted from its first, which is rounded; only pairs of eights are.
    """
    step = 1 / side
    index = np.arange(int(np.ceil((1.0 - step) / step)))
    single = (step + step * index).astype(F32)
    eights = (single[index // 8 * 8].astype(F64) + index % 8 * step).astype(F32)
    return np.where(index < len(index) // 16 * 16, eights, single)


def _summed(grid: Floats, rows: int, columns: int) -> Floats:
    """The sum of a row for the column, of the first table, and one for the line, of the second (grid [2, n,
    hidden])."""
    if max(rows, columns) > grid.shape[1]:
        raise ValueError(f"the image has {rows} x {columns} patches, the tower has positions of {grid.shape[1]} a side")
    return grid[1, :rows, None] + grid[0, None, :columns]


LEARNED: dict[str, Callable[[Floats, int, int], Floats]] = {
    "same": _same,
    "bicubic": _between(bicubic),
    "bilinear": _between(partial(bilinear, corners=True)),
    "buckets": _buckets,
    "antialiased": antialiased,
    "summed": _summed,
    "paired": lambda grid, rows, columns: _summed(grid.swapaxes(0, 1), rows, columns),
}
"""How a table of positions [rows, columns, hidden] meets an image of other sizes."""


def learned(table: Floats, patches: Patches, rows: int, columns: int) -> Floats:
    """Positions [first + rows * columns, hidden] of a tile, from the `table` [positions, hidden] f32."""
    first, grid = table[: patches.first], table[patches.first :].reshape(*patches.grid, -1)
    found = LEARNED[patches.positions](grid, rows, columns)
    if patches.merge > 1:
        found = found[order(rows, columns, patches.merge)]
    return np.concatenate((first, found.reshape(rows * columns, -1)))


@lru_cache(maxsize=32)
def turns(rope: Rope, head_dim: int, rows: int, columns: int, merge: int, first: int = 0, start: int = 0) -> Floats:
    """Cosines and sines [first + rows * columns, 2, head_dim / 2] f32: half of a head's pairs turn by line, half by
    column, counted from `start`; the `first` rows do not turn.

    Where the rope is of all of a head, every second of its frequencies is for columns; else both take all of them. One
    without dimensions turns nothing, [1, 2, 0].
    """
    if not rope.dim:
        return np.empty((1, 2, 0), F32)
    frequencies = rope.scaling.inverse_frequencies(rope.theta, rope.dim, 1)
    lines, across = (frequencies[0::2], frequencies[1::2]) if rope.dim == head_dim else (frequencies, frequencies)
    row, column = ((places + start).astype(F32)[:, None] for places in order(rows, columns, merge))
    angles = np.concatenate((row * lines, column * across), 1).astype(F64)
    angles = np.concatenate((np.zeros((first, angles.shape[1])), angles))
    return np.stack((np.cos(angles), np.sin(angles)), 1).astype(F32)


@lru_cache(maxsize=32)
def windows(rows: int, columns: int, patches: Patches) -> Groups:
    """The rows of each window, which see each other.

    Windows are squares of `patches.window` patches a side from the upper left corner on, cut at the other borders.
    """
    merge, side = patches.merge, patches.window // patches.merge
    squares = np.arange(rows * columns // merge**2).reshape(rows // merge, columns // merge)
    by_size: dict[int, list[Places]] = {}
    for top in range(0, squares.shape[0], side):
        for left in range(0, squares.shape[1], side):
            inside = squares[top : top + side, left : left + side].reshape(-1, 1)
            found = (inside * merge**2 + np.arange(merge**2)).reshape(-1)
            by_size.setdefault(len(found), []).append(found)
    return tuple(np.stack(found) for found in by_size.values())
