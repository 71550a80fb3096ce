"""Sizes and cuts of images, by Pillow, to the bit as transformers' processors of the "pil" kind make them.

In their order of rounding: of what a resize does to a size, only these lines know. Sizes are (height, width) in pixels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadRequest, ModelError
from quire.images.decoding import pillow
from quire.images.processor_config import MOST_SIDE, Size

if TYPE_CHECKING:
    from PIL import Image

MOST_PIXELS = 1 << 26
"""Of a resized image that is there whole (256 MiB): one of 1 x 10,000 whose shorter side becomes 336 has a thousand
million, and a crop of 336 x 336 is all that is wanted of it."""
BAND = 64
"""Rows of a padded image that are there at a time."""


def size_of(image: Image.Image) -> tuple[int, int]:
    """Height and width."""
    return image.height, image.width


def size_after(before: tuple[int, int], size: Size) -> tuple[int, int]:
    """What an image of the size `before` (height, width) is resized to."""
    height, width = before
    if size.shortest and size.longest:
        return _within(height, width, size.shortest, size.longest)
    if size.shortest:
        short, long = min(before), max(before)
        other = int(size.shortest * long / short)
        return (other, size.shortest) if width <= height else (size.shortest, other)
    if size.max_height and size.max_width:
        scale = min(size.max_height / height, size.max_width / width)
        return int(height * scale), int(width * scale)
    if size.height and size.width:
        return size.height, size.width
    raise ModelError("a processor's size must give height and width, shortest_edge, or max_height and max_width")


def _within(height: int, width: int, shortest: int, longest: int) -> tuple[int, int]:
    """The shorter side `shortest`, unless the longer one would exceed `longest`, which then is what it becomes."""
    short, long = float(min(height, width)), float(max(height, width))
    wanted, exact = shortest, float(shortest)
    if long / short * shortest > longest:
        exact = longest * short / long
        wanted = round(exact)
    if min(height, width) == wanted:
        return height, width
    if width < height:
        return int(exact * height / width), wanted
    return wanted, int(exact * width / height)


def resized(image: Image.Image, size: tuple[int, int], resample: int) -> Image.Image:
    """`image` with the size `size`; `BadRequest` where that leaves nothing, or too much."""
    height, width = size
    if height < 1 or width < 1 or height * width > MOST_PIXELS:
        raise BadRequest(f"the image of {image.width} x {image.height} pixels is too thin for this model: it "
                         f"would become {width:,} x {height:,}")  # fmt: skip
    return image.resize((width, height), resample=pillow().Resampling(resample))


def centered(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The middle of `image`, with black around it where it is smaller."""
    top, left = (image.height - size[0]) // 2, (image.width - size[1]) // 2
    return image.crop((left, top, left + size[1], top + size[0]))


def resized_middle(image: Image.Image, whole: tuple[int, int], crop: tuple[int, int], resample: int) -> Image.Image:
    """The middle, of the size `crop`, of `image` resized to `whole`.

    Of a huge `whole` only the middle is computed, whose numbers may then differ by one: a box begins between pixels.
    """
    if whole[0] * whole[1] <= MOST_PIXELS or min(whole) < 1:
        return centered(resized(image, whole, resample), crop)
    begin = [max(0, (w - c) // 2) for w, c in zip(whole, crop, strict=True)]
    count = [min(w, c) for w, c in zip(whole, crop, strict=True)]
    scale = image.height / whole[0], image.width / whole[1]
    top, left = (b * s for b, s in zip(begin, scale, strict=True))
    bottom, right = ((b + c) * s for b, c, s in zip(begin, count, scale, strict=True))
    box = (left, top, min(right, image.width), min(bottom, image.height))
    found = image.resize((count[1], count[0]), resample=pillow().Resampling(resample), box=box)
    return centered(found, crop)


def on_square(
    image: Image.Image, color: tuple[int, int, int], size: tuple[int, int] | None, resample: int
) -> Image.Image:
    """`image` in the middle of a square of `color`, resized to `size` (None: as large as it is).

    The square is never there whole: Pillow resizes along rows first, each by itself, so bands of rows do.
    """
    opener = pillow()
    side = max(image.size)
    left, above = (side - image.width) // 2, (side - image.height) // 2
    if image.width == image.height:
        return image if size is None else resized(image, size, resample)
    if size is None and side > MOST_SIDE // 2:
        raise BadRequest(f"the image of {image.width} x {image.height} pixels is too long to be padded to a square")
    width = side if size is None else size[1]
    found = opener.new("RGB", (width, side))
    for top in range(0, side, BAND):
        band = opener.new("RGB", (side, min(BAND, side - top)), color)
        band.paste(image, (left, above - top))
        found.paste(band.resize((width, band.height), resample=opener.Resampling(resample)), (0, top))
    return found if size is None else resized(found, size, resample)


def tiles_of(image: Image.Image, height: int, width: int) -> list[Image.Image]:
    """`image` cut into tiles row by row; those of the last row and column may be smaller."""
    return [
        image.crop((left, top, min(left + width, image.width), min(top + height, image.height)))
        for top in range(0, image.height, height)
        for left in range(0, image.width, width)
    ]


def stacked(tiles: list[Image.Image]) -> NDArray[np.uint8]:
    """uint8 [tiles, height, width, 3]."""
    if len({tile.size for tile in tiles}) != 1:
        raise ModelError(
            "preprocessor_config.json: tiles of one image come out in different sizes; size, crop_size and "
            "image_grid_pinpoints do not fit together"
        )
    return np.stack([np.asarray(tile, np.uint8) for tile in tiles])
