"""How the rows of an image's tiles become its features (LLaVA-NeXT, Liu et al. 2024; OneVision, Li et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from quire.core.images import PromptImage
from quire.model.vision.interpolation import bilinear
from quire.model.vision.reading import Reading
from quire.ops.arrays import Array, concat, is_tensor


def best_size(size: tuple[int, int], possible: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The one of `possible` sizes (height, width) that keeps most of an image, and among those wastes least."""
    height, width = size

    def kept(target: tuple[int, int]) -> tuple[int, int]:
        scale = min(target[1] / width, target[0] / height)
        effective = min(int(width * scale) * int(height * scale), width * height)
        return effective, effective - target[0] * target[1]

    return max(possible, key=kept)


def unpadded(grid: Array, size: tuple[int, int]) -> Any:
    """grid [rows, columns, hidden] without the lines or columns that only make an image of `size` fill it."""
    (height, width), (rows, columns) = size, grid.shape[:2]
    if width / height > columns / rows:
        inside = int(round(height * (columns / width), 7))
        edge = (rows - inside) // 2
        return grid[edge : rows - edge]
    inside = int(round(width * (rows / height), 7))
    edge = (columns - inside) // 2
    return grid[:, edge : columns - edge]


def _shrunk(grid: Any, lines: int, across: int) -> Any:
    """grid [rows, columns, hidden] as [lines, across, hidden], by torch where it is torch's."""
    if not is_tensor(grid):
        return bilinear(grid, lines, across, corners=False)
    import torch.nn.functional as F

    found = F.interpolate(grid.permute(2, 0, 1)[None], (lines, across), mode="bilinear")
    return found[0].permute(1, 2, 0)


def _tiles(rows: Array, image: PromptImage, reading: Reading, newline: Array | None) -> Any:
    return rows.reshape(-1, rows.shape[2])


def _lines(rows: Array, image: PromptImage, reading: Reading, newline: Array | None) -> Any:
    """The whole image, then its lines over all tiles, `newline` at the end of each; shrunk to the rows of `most`."""
    assert newline is not None, "the claim requires it"
    if len(rows) == 1:
        return concat((rows[0], newline[None]))
    side = math.isqrt(rows.shape[1])
    height, width = (s // reading.tile for s in best_size(image.size, reading.pinpoints))
    tiles = rows[1:].reshape(height, width, side, side, -1).swapaxes(1, 2)
    grid = unpadded(tiles.reshape(height * side, width * side, -1), image.size)
    ratio = math.sqrt(grid.shape[0] * grid.shape[1] / (reading.most * side**2)) if reading.most else 0.0
    if ratio > 1.1:
        grid = _shrunk(grid, int(grid.shape[0] // ratio), int(grid.shape[1] // ratio))
    ends = newline[None, None][np.zeros(len(grid), np.int64)]
    return concat((rows[0], concat((grid, ends), 1).reshape(-1, grid.shape[2])))


PACKINGS: dict[str, Callable[[Any, PromptImage, Reading, Any], Any]] = {"tiles": _tiles, "lines": _lines}
"""Rows [tiles, rows of a tile, hidden] to features [rows, hidden]; the first tile of "lines" is the whole image."""
