"""Images of a prompt: prepared, written into its text, and found again among its ids.

A chat template writes a mark for each image. Before the text is encoded, each mark becomes what its family writes for
the image, so that words next to it are encoded as they were in training; after that, rows become ids of its digest.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.core.errors import BadRequest, ModelError
from quire.core.images import KEY_BYTES, PromptImage, placeholders
from quire.images.decoding import to_rgb
from quire.images.layout import ImageLayout
from quire.images.one_tile import ImageTiles
from quire.images.processor_config import Settings, read_settings
from quire.images.prompt_layouts import make_layout
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class PromptImagePart:
    """What becomes one `PromptImage`: all of it but where its `rows` are in the prompt."""

    key: bytes
    pixels: bytes
    shape: tuple[int, int, int]
    rows: int
    size: tuple[int, int]
    grid: tuple[int, int]


@dataclass(frozen=True)
class PreparedImage:
    """An image that was cut, and the `text` that takes the place of its mark, with a token for each of its rows.

    `parts`: the images that the engine sees: one, or those whose rows the tower makes by themselves.
    """

    text: str
    parts: tuple[PromptImagePart, ...]

    @property
    def rows(self) -> int:
        """Rows of the prompt whose embeddings the tower makes."""
        return sum(part.rows for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the image's pixels."""
        return sum(len(part.pixels) for part in self.parts)

    @property
    def key(self) -> bytes:
        """Digest of its pixels and of what its features depend on."""
        if len(self.parts) == 1:
            return self.parts[0].key
        return hashlib.blake2b(b"".join(part.key for part in self.parts), digest_size=KEY_BYTES).digest()


class ImagePrompts:
    """What a model makes of images in its prompts. Immutable, and safe to share between threads.

    `image_token`: what its chat template writes for an image. `row_id`: the id that stands for a row until `place`.
    `most_rows`: an image has at most.
    """

    def __init__(self, layout: ImageLayout, row_id: int, facts: bytes) -> None:
        self._layout = layout
        self._facts = facts
        self.row_id = row_id
        self.image_token = layout.mark
        self.row_token = layout.token
        self.most_rows = layout.most_rows

    def prepare(self, pil_image: Image.Image, alone: bool = True) -> PreparedImage:
        """Cut the image as the model's files say; takes milliseconds, and megabytes for a moment.

        `alone`: no other image is in the prompt; LLaVA-OneVision cuts those of several otherwise. `BadRequest` for
        one that the model cannot take.
        """
        pil_image = to_rgb(pil_image)
        size = pil_image.height, pil_image.width
        cut = self._layout.processor(pil_image, alone)
        text = self._layout.text(cut, size)
        rows = text.count(self.row_token)
        grid, parts = self._layout.grid(cut), self._layout.parts(cut, rows)
        return PreparedImage(text, tuple(self._part(part, count, size, grid) for part, count in parts))

    def _part(self, cut: ImageTiles, rows: int, size: tuple[int, int], grid: tuple[int, int]) -> PromptImagePart:
        count, height, width = cut.tiles.shape[:3]
        pixels = cut.tiles.tobytes()
        found = hashlib.blake2b(self._facts, digest_size=KEY_BYTES)
        found.update(struct.pack("<8q", count, height, width, rows, *size, *grid))
        found.update(pixels)
        return PromptImagePart(found.digest(), pixels, (count, height, width), rows, size, grid)

    def expand(self, text: str, prepared: Sequence[PreparedImage]) -> str:
        """`text` with what the family writes for each image in the place of its mark, in their order.

        Marks that `Tokenizer.escape` has cut are a user's words, and stay so.
        """
        pieces = text.split(self.image_token)
        if len(pieces) - 1 != len(prepared):
            raise BadRequest(f"the prompt has {len(pieces) - 1} places for images ({self.image_token!r}), and "
                             f"{len(prepared)} images came with it")  # fmt: skip
        joined = [pieces[0]]
        for image, piece in zip(prepared, pieces[1:], strict=True):
            joined += (image.text, piece)
        return "".join(joined)

    def place(
        self, ids: Sequence[int], prepared: Sequence[PreparedImage], vocab_size: int
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """The ids of a prompt with rows of images under ids from `vocab_size` on, and the images.

        `BadRequest` where the prompt has not exactly the rows of `prepared`.
        """
        found = np.asarray(ids, np.int64)
        at = np.flatnonzero(found == self.row_id)
        wanted = sum(image.rows for image in prepared)
        if len(at) != wanted:
            raise BadRequest(f"the prompt has {len(at)} rows of images (id {self.row_id}), and its {len(prepared)} "
                             f"images {wanted}")  # fmt: skip
        images, taken = [], 0
        for part in (part for image in prepared for part in image.parts):
            rows = at[taken : taken + part.rows]
            taken += part.rows
            found[rows] = placeholders(part.key, part.rows, vocab_size)
            images.append(
                PromptImage(
                    key=part.key, pixels=part.pixels, shape=part.shape, runs=_runs(rows), size=part.size, grid=part.grid
                )
            )
        return found.tolist(), tuple(images)


def _runs(rows: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[tuple[int, int], ...]:
    """(start, count) of what follows each other in ascending `rows`."""
    starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    counts = np.diff(np.append(starts, len(rows)))
    return tuple((int(rows[start]), int(count)) for start, count in zip(starts, counts, strict=True))


def open_image_prompts(
    folder: str | Path, tokenizer: Tokenizer | None = None, settings: Settings | None = None
) -> ImagePrompts | None:
    """What the model in `folder` makes of images; None if it takes none, or does not say how (a folder without
    preprocessor_config.json). `settings`: what is said of them elsewhere, for a GGUF file.

    With its `tokenizer`, tokens are checked against it, and a user's text can forge none (`Tokenizer.guard`).
    `ModelError` names what does not fit.
    """
    folder = Path(folder)
    settings = read_settings(folder) if settings is None and folder.is_dir() else settings
    layout = None if settings is None else make_layout(settings)
    if settings is None or layout is None:
        return None
    config = settings.config
    row_id = config.get("image_token_id")
    row_id = config.get("image_token_index") if row_id is None else row_id
    if tokenizer is not None:
        known = tokenizer.token_to_id(layout.token)
        if known is None:
            raise ModelError(f"{folder}: the token of images, {layout.token!r}, is not in the tokenizer's vocabulary")
        if row_id not in (None, known):
            raise config.wrong("image_token_id", f"is {row_id}, the tokenizer's id of {layout.token!r} {known}")
        row_id = known
        tokenizer.guard({layout.mark, layout.token})
    if layout.most_rows < 1:
        raise settings.text.wrong("patch_size", "leaves an image no rows")
    if not isinstance(row_id, int):
        raise config.wrong("image_token_id", f"is missing, or no integer: {row_id!r}")
    return ImagePrompts(layout, row_id, _facts(settings))


def _facts(settings: Settings) -> bytes:
    """What beside its pixels the features of an image depend on, as far as the folder's files for images say."""
    said = [settings.image.values, settings.text.values, settings.config.values.get("model_type")]
    return json.dumps(said, sort_keys=True).encode()
