"""Images as several tiles of one size, beside the whole one: what towers of one size see of details."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from quire.core.errors import BadRequest
from quire.images.one_tile import BICUBIC, ImageTiles, Pixels, Whole, bounded
from quire.images.processor_config import MOST_PIXELS, SettingFields, Size
from quire.images.resizing import resized, size_after, size_of, stacked, tiles_of

if TYPE_CHECKING:
    from PIL import Image

LANCZOS, BILINEAR = 1, 2
"""Numbers of filters, as files write them."""


class AnyResolution(Whole):
    """The whole image and, of that resolution of a list which fits it best, its tiles (Liu et al. 2024, LLaVA-NeXT).

    `squares` (LLaVA-OneVision): an image among others of a prompt is one tile, padded to a square.
    """

    def __init__(self, fields: SettingFields, size: Size, crop: int, pinpoints: list[Pixels], squares: bool) -> None:
        super().__init__(fields, size, crop)
        self.squares = squares
        self.pinpoints = _pairs(fields, "image_grid_pinpoints", pinpoints)
        wanted = self.size or fields.size("size", size, square=False)
        shortest = wanted.shortest
        self.base = (wanted.height, wanted.width) if wanted.height and wanted.width else (shortest, shortest)
        cropped = fields.size("crop_size", Size(height=crop, width=crop), square=True).height
        self.side = cropped or wanted.height or shortest
        if not self.side or not all(self.base):
            raise fields.wrong("size", "must give height and width, or shortest_edge")

    def __call__(self, image: Image.Image, alone: bool) -> ImageTiles:
        """The whole image in the first tile, behind it those it is cut into, row by row."""
        if self.squares and not alone:
            return ImageTiles(stacked([self.squared(image)]))
        best = self.best(size_of(image))
        inner = _inside(size_of(image), best)
        above, left = (best[0] - inner[0]) // 2, (best[1] - inner[1]) // 2
        fitted = resized(image, inner, self.resample)
        padded = fitted.crop((-left, -above, best[1] - left, best[0] - above))
        tiles = [resized(image, self.base, self.resample), *tiles_of(padded, self.side, self.side)]
        split = -(-best[0] // self.side), -(-best[1] // self.side)
        return ImageTiles(stacked([self.tile(tile) for tile in tiles]), split)

    def best(self, size: Pixels) -> Pixels:
        """The resolution that keeps most of the image's pixels, and of those the smallest."""
        height, width = size

        def kept(choice: Pixels) -> int:
            scale = min(choice[1] / width, choice[0] / height)
            return min(int(width * scale) * int(height * scale), width * height)

        return max(self.pinpoints, key=lambda choice: (kept(choice), kept(choice) - choice[0] * choice[1]))


def _inside(size: Pixels, target: Pixels) -> Pixels:
    """The largest size of the image's shape within `target`."""
    height, width = size
    wide, high = target[1] / width, target[0] / height
    if wide < high:
        return min(math.ceil(height * wide), target[0]), target[1]
    return target[0], min(math.ceil(width * high), target[1])


def _pairs(fields: SettingFields, name: str, default: list[Pixels]) -> list[Pixels]:
    value = fields.get(name)
    if value is None:
        return default
    try:
        found = [(int(height), int(width)) for height, width in value]
    except (TypeError, ValueError):
        raise fields.wrong(name, "must be a list of [height, width]") from None
    if not found or any(h < 1 or w < 1 or h * w > MOST_PIXELS for h, w in found):
        raise fields.wrong(name, "must list sizes of at least a pixel and no more than a file may ask for")
    return found


class PanAndScan:
    """The image in one size; crops of long ones, if the file says so, in the same (Gemma team 2025, Gemma 3)."""

    def __init__(self, fields: SettingFields) -> None:
        self.resample = fields.number("resample", BILINEAR, most=5)
        size = fields.size("size", Size(height=224, width=224), square=True)
        self.size = size if fields.flag("do_resize", True) else None
        self.scans = fields.flag("do_pan_and_scan", False)
        self.least = fields.number("pan_and_scan_min_crop_size", 256, 1)
        self.most = fields.number("pan_and_scan_max_num_crops", 4, 1, 64)
        self.ratio = fields.real("pan_and_scan_min_ratio_to_activate", 1.2)

    def __call__(self, image: Image.Image, alone: bool) -> ImageTiles:
        """The whole image in the first tile, behind it its crops along its longer side."""
        crops = self.crops(image) if self.scans else []
        split = (0, 0) if not crops else (1, len(crops)) if image.width >= image.height else (len(crops), 1)
        whole = [image, *crops]
        if self.size is not None:
            whole = [resized(tile, size_after(size_of(tile), self.size), self.resample) for tile in whole]
        return ImageTiles(stacked(whole), split)

    def crops(self, image: Image.Image) -> list[Image.Image]:
        """Side by side, as many as the image is longer than wide; none of one that is not long, or is small."""
        short, long = min(image.size), max(image.size)
        if long / short < self.ratio:
            return []
        count = min(math.floor(long / self.least), math.floor(long / short + 0.5))
        count = min(self.most, max(2, count))
        step = math.ceil(long / count)
        if min(step, short) < self.least:
            return []
        wide = image.width >= image.height
        return tiles_of(image, short if wide else step, step if wide else short)


class Split:
    """Resized to a long side, cut into squares, the whole image behind them (Laurençon et al. 2024, Idefics3)."""

    MOST = 4096
    """Pixels of a side, whatever the file says."""

    def __init__(self, fields: SettingFields) -> None:
        self.resample = fields.number("resample", LANCZOS, most=5)
        self.size = fields.size("size", Size(longest=4 * 364), square=True)
        self.splits = fields.flag("do_image_splitting", True)
        self.side = fields.size("max_image_size", Size(longest=364), square=True).longest
        if not self.side:
            raise fields.wrong("max_image_size", "must give longest_edge")
        if not fields.flag("do_resize", True):
            raise fields.wrong("do_resize", "must be true: else the number of tiles has no bound")
        size = self.size
        longest = min(size.longest + size.longest % 2, self.MOST) or max(size.height, size.width)
        self.most = -(-longest // self.side)

    def __call__(self, image: Image.Image, alone: bool) -> ImageTiles:
        """The tiles row by row, the whole image in the last; or only that."""
        image = resized(image, self.first_size(size_of(image)), self.resample)
        square = self.side, self.side
        if not self.splits:
            return ImageTiles(stacked([resized(image, square, self.resample)]))
        image = resized(image, self.multiples(size_of(image)), self.resample)
        rows, columns = image.height // self.side, image.width // self.side
        if rows == columns == 1:
            return ImageTiles(stacked([image]))
        tiles = tiles_of(image, *square)
        return ImageTiles(stacked([*tiles, resized(image, square, self.resample)]), (rows, columns))

    def first_size(self, size: Pixels) -> Pixels:
        """The longer side becomes that of the file, the shorter one an even number."""
        wanted = self.size
        if not wanted.longest:
            return size_after(size, wanted)
        height, width = size
        ratio = width / height
        if width >= height:
            width, height = wanted.longest, _even(int(wanted.longest / ratio))
        else:
            height, width = wanted.longest, _even(int(wanted.longest * ratio))
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > self.MOST:
            height, width = int(self.MOST / ratio), self.MOST
        elif height > width and height > self.MOST:
            height, width = self.MOST, int(self.MOST * ratio)
        return max(height, 1), max(width, 1)

    def multiples(self, size: Pixels) -> Pixels:
        """Each side as a multiple of the tile's, the longer one first."""
        height, width = size
        ratio, side = width / height, self.side
        if width >= height:
            width = math.ceil(width / side) * side
            return math.ceil(int(width / ratio) / side) * side, width
        height = math.ceil(height / side) * side
        return height, math.ceil(int(height * ratio) / side) * side


def _even(number: int) -> int:
    return number + number % 2


class Canvas:
    """Stretched over the grid of tiles that is closest to its shape, the whole image behind them (Chen et al. 2024,
    InternVL 1.5)."""

    def __init__(self, fields: SettingFields) -> None:
        self.resample = fields.number("resample", BICUBIC, most=5)
        size = fields.size("size", Size(height=384, width=384), square=True)
        self.tile = size.height, size.width
        if not all(self.tile):
            raise fields.wrong("size", "must give height and width")
        self.least = fields.number("min_patches", 1, 1, 256)
        self.most = fields.number("max_patches", 12, 1, 256)
        self.cuts = fields.flag("crop_to_patches", False) and self.most > 1

    def __call__(self, image: Image.Image, alone: bool) -> ImageTiles:
        """The tiles row by row, behind several the whole image."""
        if not self.cuts:
            return ImageTiles(stacked([resized(image, self.tile, self.resample)]))
        rows, columns = self.grid(size_of(image))
        whole = resized(image, (rows * self.tile[0], columns * self.tile[1]), self.resample)
        tiles = tiles_of(whole, *self.tile)
        if len(tiles) == 1:
            return ImageTiles(stacked(tiles))
        return ImageTiles(stacked([*tiles, resized(image, self.tile, self.resample)]), (rows, columns))

    def grid(self, size: Pixels) -> Pixels:
        """Rows and columns of the tiles."""
        return closest_grid(size, self.tile, self.least, self.most)


def closest_grid(size: Pixels, tile: Pixels, fewest: int, most: int) -> Pixels:
    """Rows and columns of `fewest` to `most` tiles whose shape is closest to that of an image of `size`.

    Of grids of one shape, larger ones while the image has more than half of their pixels.
    """
    ratio, area = size[1] / size[0], size[0] * size[1]
    best, least = (1, 1), math.inf
    for rows, columns in grids(fewest, most):
        apart = abs(ratio - columns / rows)
        if apart < least or (apart == least and area > 0.5 * tile[0] * tile[1] * rows * columns):
            best, least = (rows, columns), apart
    return best


def grids(fewest: int, most: int) -> list[Pixels]:
    """All grids of so many tiles, by their number; of one number, those of fewer columns first."""
    each = range(1, most + 1)
    found = [(rows, columns) for columns in each for rows in each if fewest <= rows * columns <= most]
    return sorted(found, key=lambda grid: grid[0] * grid[1])


class GridAndWhole:
    """One tile in multiples of a merged patch, within bounds of its pixels; a large image comes as the tiles of the
    grid that is closest to its shape, and behind them whole in that size (Liquid AI 2025, LFM2-VL)."""

    def __init__(self, fields: SettingFields) -> None:
        self.resample = fields.number("resample", BILINEAR, most=5)
        self.patch = fields.number("encoder_patch_size", 16, 1, 1024)
        self.merge = fields.number("downsample_factor", 2, 1, 64)
        self.factor = self.patch * self.merge
        self.side = fields.number("tile_size", 512, 1)
        if self.side % self.factor:
            raise fields.wrong("tile_size", f"is {self.side}, no multiple of {self.factor}, a side of a merged patch")
        counts = fields.number("min_image_tokens", 64, 1, 1 << 16), fields.number("max_image_tokens", 256, 1, 1 << 16)
        self.bounds = counts[0] * self.factor**2, counts[1] * self.factor**2
        self.tolerance = fields.real("max_pixels_tolerance", 2.0)
        self.fewest, self.most = fields.number("min_tiles", 2, 1, 256), fields.number("max_tiles", 10, 1, 256)
        if self.fewest > self.most:
            raise fields.wrong("min_tiles", f"is {self.fewest}, more than max_tiles, {self.most}")
        self.cuts = fields.flag("do_image_splitting", True) and self.most > 1
        self.adds_whole = fields.flag("use_thumbnail", True)
        self.most_pixels = max(self.bounds[1], self.side**2 if self.cuts else 0)

    def __call__(self, image: Image.Image, alone: bool) -> ImageTiles:
        """One tile, or those of the grid row by row with the whole image behind them."""
        size = size_of(image)
        one = stacked([resized(image, self.size(size), self.resample)])
        rows, columns = closest_grid(size, (self.side, self.side), self.fewest, self.most)
        if not self.is_large(size) or rows == columns == 1:
            return ImageTiles(one)
        stretched = resized(image, (rows * self.side, columns * self.side), self.resample)
        tiles = stacked(tiles_of(stretched, self.side, self.side))
        return ImageTiles(tiles, (rows, columns), one if self.adds_whole else None)

    def is_large(self, size: Pixels) -> bool:
        """Whether an image of `size` is cut."""
        high, wide = (max(self.patch, round(side / self.factor) * self.factor) for side in size)
        return self.cuts and high * wide > self.bounds[1] * self.tolerance

    def size(self, size: Pixels) -> Pixels:
        """Size of the whole image: multiples of a merged patch; `BadRequest` for one that is too thin."""
        high, wide = (max(self.factor, round(side / self.factor) * self.factor) for side in size)
        found = bounded(size, (high, wide), self.factor, self.bounds)
        if found[0] * found[1] > self.most_pixels:
            raise BadRequest(f"the image of {size[1]} x {size[0]} pixels is too thin for this model: it would become "
                             f"{found[1]} x {found[0]}")  # fmt: skip
        return found
