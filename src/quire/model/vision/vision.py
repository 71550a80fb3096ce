"""Features of images: what the decoder is given in the place of embedded tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.core.dtypes import F32
from quire.core.images import PromptImage
from quire.model.vision.account import scratch_bytes
from quire.model.vision.packing import PACKINGS
from quire.model.vision.reading import Reading
from quire.model.vision.tower import Projector, Tower
from quire.ops.arrays import Array, as_f32, concat, contiguous
from quire.ops.lazy import one_torch_thread


@dataclass(frozen=True)
class Vision:
    """A tower, what brings its rows to the decoder's width, and what makes further features.

    `deep`: projectors of further features, those of the tower's `reading.deep` layers. `newline` [hidden]: the row
    behind each line of an image. `nbytes`: of all weights. `settings`: what its features depend on beside pixels.
    `file`: where it lies, if it has a file of its own.
    """

    tower: Tower
    projector: Projector
    deep: tuple[Projector, ...]
    newline: Array | None
    reading: Reading
    nbytes: int
    settings: bytes
    file: Path | None = None

    @property
    def width(self) -> int:
        """Numbers of a feature row: the decoder's width, and as many again for each of the further features."""
        return self.projector.hidden * (1 + len(self.deep))

    def scratch(self, rows: int) -> int:
        """Bytes that encoding an image of `rows` rows takes beside its features."""
        return scratch_bytes(self.tower.spec, rows)

    def __call__(self, image: PromptImage) -> Array:
        """Features [image.rows, width] f32: the row for the embedding, then those added behind the first layers.

        They stand for embeddings that were scaled already, where a decoder scales them. `ValueError` where the image
        was not prepared for this tower.
        """
        with one_torch_thread():
            found: Array = self._features(image)
        if len(found) != image.rows:
            raise ValueError(f"the tower makes {len(found)} rows of an image that has {image.rows} in the prompt")
        return found

    def _features(self, image: PromptImage) -> Any:
        reading = self.reading
        wanted = tuple(sorted({*reading.taps, *reading.deep}))
        kept = dict(zip(wanted, self.tower(self._pixels(image), wanted, reading.normed), strict=True))
        rows = self._project(self.projector, [kept[tap] for tap in reading.taps])
        found = PACKINGS[reading.packing](rows, image, reading, self.newline)
        if reading.scale != 1.0:
            found = found * reading.scale
        more = [self._project(p, [kept[tap]]) for p, tap in zip(self.deep, reading.deep, strict=True)]
        return as_f32(concat((found, *(part.reshape(-1, part.shape[2]) for part in more)), 1) if more else found)

    def _pixels(self, image: PromptImage) -> Any:
        """[tiles, height, width, 3] f32."""
        told, put = self.reading.pixels, self.tower.ops.put
        count, height, width = image.shape
        mean, std = (put(np.tile(np.array(numbers, F32), width)) for numbers in (told.mean, told.std))
        values: Any = as_f32(put(image.tiles)).reshape(count, height, -1)
        values *= told.factor
        values -= mean
        values /= std
        return values.reshape(count, height, width, 3)

    def _project(self, projector: Projector, kept: Sequence[Any]) -> Any:
        """[tiles, rows of a tile, hidden] of the rows of one layer, or of several side by side."""
        wide = concat(tuple(kept), 2) if len(kept) > 1 else kept[0]
        rows = contiguous(wide[:, self.reading.drop :])
        return projector(rows.reshape(-1, rows.shape[2])).reshape(len(rows), -1, projector.hidden)
