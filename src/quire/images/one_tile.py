"""Images as one tile: those of towers that take one size, and of towers that take many."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadRequest
from quire.images.processor_config import MOST_PIXELS, SettingFields, Size
from quire.images.resizing import centered, on_square, resized, resized_middle, size_after, size_of, stacked

if TYPE_CHECKING:
    from PIL import Image

BICUBIC = 3
"""The number of the filter, as files write it."""
Pixels = tuple[int, int]
"""Height and width."""


class ImageTiles(NamedTuple):
    """`tiles`: uint8 [tiles, height, width, 3]. `split`: (rows, columns) of the tiles that are cut from the image, to
    which the whole one may be added; (0, 0) = it was not cut. `whole`: the whole one [1, height, width, 3], where it
    comes in a size of its own behind the tiles."""

    tiles: NDArray[np.uint8]
    split: tuple[int, int] = (0, 0)
    whole: NDArray[np.uint8] | None = None

    @property
    def size(self) -> Pixels:
        """Size of a tile."""
        return self.tiles.shape[1], self.tiles.shape[2]


class Whole:
    """One tile: resized, its middle cropped (CLIP, SigLIP; LLaVA may pad to a square of the mean colour before)."""

    def __init__(
        self, fields: SettingFields, size: Size, crop: int = 0, resample: int = BICUBIC, pad: bool = False
    ) -> None:
        self.resample = fields.number("resample", resample, most=5)
        self.size = fields.size("size", size, square=False) if fields.flag("do_resize", True) else None
        crops = fields.flag("do_center_crop", bool(crop))
        found = fields.size("crop_size", Size(height=crop, width=crop), square=True)
        self.crop = (found.height, found.width) if crops else None
        if self.crop is not None and not all(self.crop):
            raise fields.wrong("crop_size", "must give height and width")
        self.pad = pad
        self.color = _mean_color(fields)

    def __call__(self, image: Image.Image, alone: bool) -> ImageTiles:
        """Resized, and its middle cropped."""
        return ImageTiles(stacked([self.squared(image) if self.pad else self.tile(image)]))

    def tile(self, image: Image.Image) -> Image.Image:
        """An image, or a part of one, as the tower takes it."""
        if self.size is None:
            return image if self.crop is None else centered(image, self.crop)
        whole = size_after(size_of(image), self.size)
        if self.crop is None:
            return resized(image, whole, self.resample)
        return resized_middle(image, whole, self.crop, self.resample)

    def squared(self, image: Image.Image) -> Image.Image:
        """Tile of the image padded to a square."""
        side = max(image.size)
        whole = None if self.size is None else size_after((side, side), self.size)
        found = on_square(image, self.color, whole, self.resample)
        return found if self.crop is None else centered(found, self.crop)


def _mean_color(fields: SettingFields) -> tuple[int, int, int]:
    mean = fields.get("image_mean")
    if isinstance(mean, (int, float)):
        mean = [mean] * 3
    if mean is None:
        mean = _CLIP_MEAN
    if not isinstance(mean, list | tuple) or len(mean) != 3 or not all(isinstance(m, (int, float)) for m in mean):
        raise fields.wrong("image_mean", "must be three numbers")
    red, green, blue = (int(m * 255) for m in mean)
    return red, green, blue


_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)


class Patches:
    """One tile, as large as the image, in sides that are multiples of a patch, within bounds of its pixels (Wang et
    al. 2024, Qwen2-VL)."""

    def __init__(self, fields: SettingFields) -> None:
        self.factor = fields.number("patch_size", 14, 1, 1024) * fields.number("merge_size", 2, 1, 64)
        self.resample = fields.number("resample", BICUBIC, most=5)
        self.resizes = fields.flag("do_resize", True)
        size = fields.inner("size")
        self.least = self._pixels(fields, size, ("min_pixels", "shortest_edge"), 56 * 56)
        self.most = self._pixels(fields, size, ("max_pixels", "longest_edge"), 28 * 28 * 1280)
        if self.most < self.factor**2:
            raise fields.wrong("size", f"allows {self.most} pixels, less than a patch of {self.factor} x {self.factor}")

    @staticmethod
    def _pixels(fields: SettingFields, size: SettingFields, names: tuple[str, str], default: int) -> int:
        """Bounds stand by themselves or within `size`, under either name there."""
        inner = size.number(names[1], size.number(names[0], default, 1, MOST_PIXELS), 1, MOST_PIXELS)
        return fields.number(names[0], inner, 1, MOST_PIXELS)

    def __call__(self, image: Image.Image, alone: bool) -> ImageTiles:
        """One tile."""
        if self.resizes:
            image = resized(image, self.size(size_of(image)), self.resample)
        if image.width % self.factor or image.height % self.factor:
            raise BadRequest(f"the image of {image.width} x {image.height} pixels is no multiple of {self.factor}, "
                             "and this model resizes none")  # fmt: skip
        return ImageTiles(stacked([image]))

    def size(self, size: Pixels) -> Pixels:
        """Multiples of the patch next to `size`, whose product is within bounds."""
        height, width = size
        if max(size) / min(size) > MOST_RATIO:
            raise BadRequest(f"the image of {width} x {height} pixels is too thin: this model takes none that is "
                             f"more than {MOST_RATIO} times as long as wide")  # fmt: skip
        near = round(height / self.factor) * self.factor, round(width / self.factor) * self.factor
        return bounded(size, near, self.factor, (self.least, self.most))


def bounded(size: Pixels, near: Pixels, factor: int, bounds: tuple[int, int]) -> Pixels:
    """`near`, or where its pixels are outside `bounds` (least, most) the sides of `size` scaled into them, in multiples
    of `factor`."""
    (height, width), (least, most) = size, bounds
    if near[0] * near[1] > most:
        shrink = math.sqrt(height * width / most)
        high = max(factor, math.floor(height / shrink / factor) * factor)
        return high, max(factor, math.floor(width / shrink / factor) * factor)
    if near[0] * near[1] < least:
        grow = math.sqrt(least / (height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return near


MOST_RATIO = 200
"""Of an image's sides, to Qwen's processors."""


class LongestEdge:
    """One tile, as large as the image, its longer side at most that of the file, in multiples of a patch (Agrawal et
    al. 2024, Pixtral)."""

    def __init__(self, fields: SettingFields) -> None:
        self.resample = fields.number("resample", BICUBIC, most=5)
        size = fields.size("size", Size(longest=1024), square=True)
        self.most = (size.longest, size.longest) if size.longest else (size.height, size.width)
        patch = fields.size("patch_size", Size(height=16, width=16), square=True)
        self.patch = patch.height, patch.width
        if not all(self.most) or not all(self.patch):
            raise fields.wrong("size", "must give longest_edge, or height and width")
        self.resizes = fields.flag("do_resize", True)

    def __call__(self, image: Image.Image, alone: bool) -> ImageTiles:
        """One tile."""
        if self.resizes:
            image = resized(image, self.size(size_of(image)), self.resample)
        return ImageTiles(stacked([image]))

    def size(self, size: Pixels) -> Pixels:
        """The multiples of a patch that hold the image, shrunk where it is too long."""
        ratio = max(size[0] / self.most[0], size[1] / self.most[1])
        if ratio > 1:
            size = math.floor(size[0] / ratio), math.floor(size[1] / ratio)
        high, wide = (((side - 1) // patch + 1) * patch for side, patch in zip(size, self.patch, strict=True))
        return high, wide


BUDGETS = (70, 140, 280, 560, 1120)
"""Rows that an image may be given."""


class Budget:
    """One tile of the image's shape, as large as a number of rows allows, each of which is of a square of patches
    (Team Gemma 2026, Gemma 4)."""

    def __init__(self, fields: SettingFields) -> None:
        self.patch = fields.number("patch_size", 16, 1, 1024)
        self.square = fields.number("pooling_kernel_size", 3, 1, 64)
        self.most = fields.number("max_soft_tokens", 280)
        if self.most not in BUDGETS:
            raise fields.wrong("max_soft_tokens", f"is {self.most}, needs one of {', '.join(map(str, BUDGETS))}")
        self.factor = self.patch * self.square
        self.resample = fields.number("resample", BICUBIC, most=5)
        self.resizes = fields.flag("do_resize", True)

    def __call__(self, image: Image.Image, alone: bool) -> ImageTiles:
        """One tile."""
        if self.resizes and (size := self.size(size_of(image))) != size_of(image):
            image = resized(image, size, self.resample)
        if image.width % self.factor or image.height % self.factor or self.rows(size_of(image)) > self.most:
            raise BadRequest(f"the image of {image.width} x {image.height} pixels is not of up to {self.most} squares "
                             f"of {self.factor} pixels a side, and this model resizes none")  # fmt: skip
        return ImageTiles(stacked([image]))

    def size(self, size: Pixels) -> Pixels:
        """The largest multiples of a square in the shape of `size`; of an image that is too thin, of another shape."""
        height, width = size
        scale = math.sqrt(self.most * self.factor**2 / (height * width))
        high, wide = math.floor(scale * height / self.factor), math.floor(scale * width / self.factor)
        if not high:
            high, wide = 1, min(width // height, self.most)
        elif not wide:
            high, wide = min(height // width, self.most), 1
        return high * self.factor, wide * self.factor

    def rows(self, size: Pixels) -> int:
        """Rows of an image of `size`."""
        return size[0] // self.factor * (size[1] // self.factor)
