"""Images of a prompt: rows of the prompt whose embeddings a vision tower makes, under ids beyond the vocabulary.
See docs/design/images.md.

The ids are made from a digest of the pixels and of all that decides what the tower makes of them, so that whoever
compares tokens (prefix cache, stores of blocks, replays, routers) tells images apart and needs no rule of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadRequest

KEY_BYTES = 16
_END = 1 << 31


class PromptImage(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a prompt, ready for the tower.

    `pixels`: uint8 RGB of its tiles as they were resized and cut, C order [tiles, height, width, 3] of `shape` (all
    but the 3). `key`: digest of these and of whatever else its features depend on; features are kept under it.
    `runs`: (start, count) of its rows in the prompt, in the order of its features; other tokens may stand between them.
    `size`: of the image as it came, (height, width) in pixels. `grid`: (rows, columns) of its features where
    positions follow them (M-RoPE), else (0, 0).
    """

    key: bytes
    pixels: bytes
    shape: tuple[int, int, int]
    runs: tuple[tuple[int, int], ...]
    size: tuple[int, int]
    grid: tuple[int, int] = (0, 0)

    @property
    def rows(self) -> int:
        """Rows of the prompt, and of features."""
        return sum(count for _, count in self.runs)

    @property
    def start(self) -> int:
        """First row of the image in the prompt."""
        return self.runs[0][0]

    @property
    def end(self) -> int:
        """Position behind the image's last row in the prompt."""
        start, count = self.runs[-1]
        return start + count

    @property
    def tiles(self) -> NDArray[np.uint8]:
        """The pixels, [tiles, height, width, 3]."""
        return np.frombuffer(self.pixels, np.uint8).reshape(*self.shape, 3)


class ImageLimits(msgspec.Struct, frozen=True):
    """What an engine can do with one image, in rows of the prompt; 0 = any number.

    `kept`: rows of features that there is room for. `step`: where rows of a run see each other, those that one step
    can compute together beside a token of each other sequence.
    """

    kept: int = 0
    step: int = 0

    def check(self, size: tuple[int, int], rows: int, run: int, where: str) -> None:
        """`BadRequest` for an image of `size` (height, width) pixels, which came in the field `where`, of more rows,
        or of more in a `run`."""
        if 0 < self.kept < rows:
            raise BadRequest(
                f"{where}: {size[1]} x {size[0]} pixels are {rows} rows of the prompt, and {self.kept} rows of "
                "images are kept: send a smaller one, or raise --encoder-cache-tokens",
                param=where,
            )
        if 0 < self.step < run:
            raise BadRequest(
                f"{where}: its {run} rows see each other, so that one step computes them, and a step has room for "
                f"{self.step} beside other tokens: raise --max-num-batched-tokens",
                param=where,
            )


class ImagePiece(NamedTuple):
    """`count` rows of a step from `row` on, which are the features of an image from `feature` on."""

    row: int
    feature: int
    count: int  # type: ignore[assignment]  # of rows: nobody counts what is in a piece


def placeholders(key: bytes, count: int, vocab_size: int) -> list[int]:
    """Ids in [vocab_size, 2^31) of the rows of the image `key`. A block of 16 of them has 496 bits of the digest."""
    drawn = np.frombuffer(hashlib.shake_128(key).digest(4 * count), np.uint32)
    ids: list[int] = (drawn % (_END - vocab_size) + vocab_size).tolist()
    return ids


def pieces(image: PromptImage, start: int, end: int) -> Iterator[ImagePiece]:
    """The rows of `image` among the tokens from `start` to before `end`; `ImagePiece.row` counts from `start`."""
    feature = 0
    for first, count in image.runs:
        low, high = max(first, start), min(first + count, end)
        if low < high:
            yield ImagePiece(low - start, feature + low - first, high - low)
        feature += count


def grid_positions(images: Sequence[PromptImage], start: int, end: int) -> NDArray[np.int32]:
    """Positions [3, end - start] (time, row, column) of the tokens from `start` to before `end` (M-RoPE; Wang et al.
    2024, Qwen2-VL).

    Text counts on by one in all three. An image of h x w rows begins where the text before it ended, its rows and
    columns count from there, and what follows it begins max(h, w) later.
    """
    found = np.empty((3, end - start), np.int32)
    shift, at = 0, start
    for image in images:
        height, width = image.grid
        first, last = image.start, image.end
        if first >= end:
            break
        if at < first:
            found[:, at - start : first - start] = np.arange(at, first) + shift
        low, high = max(start, first), min(end, last)
        if low < high:
            row, column = np.divmod(np.arange(low - first, high - first), width)
            found[:, low - start : high - start] = first + shift + np.stack((np.zeros_like(row), row, column))
        shift += max(height, width) - (last - first)
        at = max(at, last)
    if at < end:
        found[:, at - start :] = np.arange(at, end) + shift
    return found


def grid_shift(images: Sequence[PromptImage], index: int) -> int:
    """What is added to the index of a token of text at `index` for its position: images before it count less."""
    return sum(max(p.grid) - p.rows for p in images if p.end <= index)
