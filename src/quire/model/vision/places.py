"""Where the patches of a picture are: their order, learned positions, rotations by row and column, windows.

Rows of a tile come in squares of `merge` x `merge` patches, line by line of squares and line by line within one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.model.families.rope import Rope
from quire.model.spec import Patches
from quire.ops.arrays import to_torch


def cut(pixels: Tensor, patches: Patches) -> Tensor:
    """pixels [tiles, height, width, 3] to patches [rows, frames * size * size * 3], in the order of rows.

    What is left of a line or column of patches is left out. `ValueError` where squares of patches do not fit.
    """
    tiles, size, merge = len(pixels), patches.size, patches.merge
    rows, columns = pixels.shape[1] // size, pixels.shape[2] // size
    if not rows or not columns or rows % merge or columns % merge:
        raise ValueError(f"{rows} x {columns} patches are not squares of {merge} x {merge}")
    whole = pixels[:, : rows * size, : columns * size]
    grid = whole.reshape(tiles, rows // merge, merge, size, columns // merge, merge, size, 3)
    found = grid.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(tiles * rows * columns, size * size * 3)
    return found.repeat(1, patches.frames) if patches.frames > 1 else found


def order(rows: int, columns: int, merge: int) -> tuple[Tensor, Tensor]:
    """Line and column [rows * columns] int64 of each patch, in the order of rows."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    squares = (rows // merge, merge, columns // merge, merge)
    row, column = (t.reshape(squares).transpose(1, 2).flatten() for t in (row, column))
    return row, column


def _same(grid: Tensor, rows: int, columns: int) -> Tensor:
    if grid.shape[:2] != (rows, columns):
        have, want = f"{rows} x {columns}", f"{grid.shape[0]} x {grid.shape[1]}"
        raise ValueError(f"the picture has {have} patches, the tower has positions of {want}")
    return grid


def _between(mode: str, corners: bool) -> Callable[[Tensor, int, int], Tensor]:
    """The table stretched over the picture; `corners`: those of both meet, else the borders."""

    def stretch(grid: Tensor, rows: int, columns: int) -> Tensor:
        if grid.shape[:2] == (rows, columns):
            return grid
        channels_first = grid.permute(2, 0, 1)[None]
        found = F.interpolate(channels_first, (rows, columns), mode=mode, align_corners=corners)
        return found[0].permute(1, 2, 0)

    return stretch


def _buckets(grid: Tensor, rows: int, columns: int) -> Tensor:
    """The position that has the patch's place in its share of the table (NaViT, Dehghani et al. 2023).

    In f32 as the models were trained: at a border other roundings would choose the neighbour.
    """

    def bucket(count: int, side: int) -> Tensor:
        borders = torch.arange(1 / side, 1.0, 1 / side)
        places = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
        return torch.bucketize(places.clamp(max=1.0 - 1e-6), borders, right=True)

    return grid[bucket(rows, grid.shape[0])][:, bucket(columns, grid.shape[1])]


LEARNED: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "same": _same,
    "bicubic": _between("bicubic", False),
    "bilinear": _between("bilinear", True),
    "buckets": _buckets,
}
"""How a table of positions [rows, columns, hidden] meets a picture of other sizes."""


def learned(table: Tensor, patches: Patches, rows: int, columns: int) -> Tensor:
    """Positions [first + rows * columns, hidden] of a tile, from the `table` [positions, hidden] f32 on the host."""
    first, grid = table[: patches.first], table[patches.first :].view(*patches.grid, -1)
    found = LEARNED[patches.positions](grid, rows, columns)
    if patches.merge > 1:
        found = found[order(rows, columns, patches.merge)]
    return torch.cat((first, found.reshape(rows * columns, -1)))


@lru_cache(maxsize=32)
def turns(rope: Rope, head_dim: int, rows: int, columns: int, merge: int) -> Tensor:
    """Cosines and sines [rows * columns, 2, head_dim / 2] f32: half of a head's pairs turn by line, half by column.

    Where the rope is of all of a head, every second of its frequencies is for columns; else both take all of them. One
    without dimensions turns nothing, [1, 2, 0].
    """
    if not rope.dim:
        return torch.empty(1, 2, 0)
    frequencies = to_torch(rope.scaling.inverse_frequencies(rope.theta, rope.dim, 1))
    lines, across = (frequencies[0::2], frequencies[1::2]) if rope.dim == head_dim else (frequencies, frequencies)
    row, column = order(rows, columns, merge)
    angles = torch.cat((row[:, None] * lines, column[:, None] * across), 1)
    return torch.stack((angles.cos(), angles.sin()), 1)


@lru_cache(maxsize=32)
def windows(rows: int, columns: int, patches: Patches) -> tuple[Tensor, ...]:
    """Rows [windows, rows of each] int64 that see each other, windows of one size together.

    Windows are squares of `patches.window` patches a side from the upper left corner on, cut at the other borders.
    """
    merge, side = patches.merge, patches.window // patches.merge
    squares = torch.arange(rows * columns // merge**2).view(rows // merge, columns // merge)
    by_size: dict[int, list[Tensor]] = {}
    for top in range(0, squares.shape[0], side):
        for left in range(0, squares.shape[1], side):
            inside = squares[top : top + side, left : left + side].flatten()
            found = (inside[:, None] * merge**2 + torch.arange(merge**2)).flatten()
            by_size.setdefault(len(found), []).append(found)
    return tuple(torch.stack(found) for found in by_size.values())
