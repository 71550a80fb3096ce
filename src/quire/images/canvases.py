"""Images on a canvas of tiles that they fit without being distorted, beside the whole one (Llama 4, Meta AI 2025)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from quire.images.one_tile import ImageTiles, Pixels
from quire.images.processor_config import SettingFields, Size
from quire.images.resizing import resized, size_of, stacked, tiles_of
from quire.images.tiles import BILINEAR

if TYPE_CHECKING:
    from PIL import Image


class FittedCanvas:
    """Tiles of the smallest canvas on which an image need not be shrunk, else of the largest; it lies in the upper left
    corner, and black is around it. Behind several tiles comes the whole image, stretched over one."""

    def __init__(self, fields: SettingFields) -> None:
        self.resample = fields.number("resample", BILINEAR, most=5)
        size = fields.size("size", Size(height=336, width=336), square=True)
        self.side, self.most = size.height, fields.number("max_patches", 16, 1, 256)
        if not self.side or size.width != self.side:
            raise fields.wrong("size", "must give a height, and a width that is the same")
        if not fields.flag("do_resize", True):
            raise fields.wrong("do_resize", "is false; images of other sizes do not fill a canvas")
        self.grows = fields.flag("resize_to_max_canvas", False)
        counts = range(1, self.most + 1)
        self.canvases = [(rows, columns) for rows in counts for columns in counts if rows * columns <= self.most]

    def __call__(self, image: Image.Image, alone: bool) -> ImageTiles:
        """The tiles row by row, behind several the whole image."""
        rows, columns = self.canvas(size_of(image))
        canvas = rows * self.side, columns * self.side
        small = resized(image, self.inside(size_of(image), canvas), self.resample)
        tiles = tiles_of(small.crop((0, 0, canvas[1], canvas[0])), self.side, self.side)
        if len(tiles) == 1:
            return ImageTiles(stacked(tiles))
        return ImageTiles(stacked([*tiles, resized(image, (self.side,) * 2, self.resample)]), (rows, columns))

    def canvas(self, size: Pixels) -> Pixels:
        """Rows and columns of the canvas for an image of `size`; scales are compared in f32, as transformers does."""
        grids = np.array(self.canvases, np.int64)
        scales = ((grids * self.side).astype(np.float32) / np.array(size, np.float32)).min(1)
        growing = scales[scales >= 1]
        if len(growing):
            scale = growing.max() if self.grows else growing.min()
        else:
            scale = scales.max()
        fitting = grids[scales == scale]
        rows, columns = fitting[np.argmin(fitting.prod(1))]
        return int(rows), int(columns)

    def inside(self, size: Pixels, canvas: Pixels) -> Pixels:
        """What an image of `size` becomes on `canvas`: no larger than it is, or than a tile."""
        high, wide = (
            most if self.grows else min(max(side, self.side), most) for side, most in zip(size, canvas, strict=True)
        )
        across, down = wide / size[1], high / size[0]
        if across < down:
            return max(1, min(math.floor(size[0] * across), high)), wide
        return high, max(1, min(math.floor(size[1] * down), wide))
