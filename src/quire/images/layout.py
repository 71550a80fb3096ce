"""How a family writes an image into its prompt: which tokens stand around and between its rows, and how many rows
it has. The text equals what transformers' processors put in the place of the mark that a chat template writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from quire.images.one_tile import ImageTiles, Pixels
from quire.images.processor_config import Settings
from quire.images.processors import Processor

if TYPE_CHECKING:
    from quire.core.errors import ModelError


class ImageLayout(Protocol):
    """`mark`: what a chat template writes for an image. `token`: that of a row. `processor`: what cuts images.

    `most_rows`: of an image, at most.
    """

    mark: str
    token: str
    processor: Processor
    most_rows: int

    def text(self, cut: ImageTiles, size: Pixels) -> str:
        """What takes the mark's place for an image that came in the size `size`; `token` once for each row."""

    def grid(self, cut: ImageTiles) -> Pixels:
        """Rows and columns of its features where positions follow them, else (0, 0)."""

    def parts(self, cut: ImageTiles, rows: int) -> list[tuple[ImageTiles, int]]:
        """Cut the image, of `rows` rows, into those that the tower makes rows of by themselves, and their rows."""


class Layout:
    """What most families have in common."""

    def __init__(self, mark: str, token: str, processor: Processor) -> None:
        self.mark = mark
        self.token = token
        self.processor = processor

    def grid(self, cut: ImageTiles) -> Pixels:
        """Implement `ImageLayout`: positions do not follow rows and columns."""
        return 0, 0

    def parts(self, cut: ImageTiles, rows: int) -> list[tuple[ImageTiles, int]]:
        """Implement `ImageLayout`: it stays one."""
        return [(cut, rows)]


def mismatch(settings: Settings, wanted: str) -> ModelError:
    """The error of a processor whose images do not come as `wanted`."""
    return settings.image.wrong("image_processor_type", f"does not fit a family whose images {wanted}")
