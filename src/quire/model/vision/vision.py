"""Features of pictures: what the decoder is given in the place of embedded tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.pictures import Picture
from quire.model.vision.account import scratch_bytes
from quire.model.vision.packing import PACKINGS
from quire.model.vision.reading import Reading
from quire.model.vision.tower import Projector, Tower


@dataclass(frozen=True)
class Vision:
    """A tower, what brings its rows to the decoder's width, and what makes further features.

    `deep`: projectors of further features, those of the tower's `reading.deep` layers. `newline` [hidden]: the row
    behind each line of a picture. `nbytes`: of all weights. `settings`: what its features depend on beside pixels.
    """

    tower: Tower
    projector: Projector
    deep: tuple[Projector, ...]
    newline: Tensor | None
    reading: Reading
    nbytes: int
    settings: bytes

    @property
    def width(self) -> int:
        """Numbers of a feature row: the decoder's width, and as many again for each of the further features."""
        return self.projector.hidden * (1 + len(self.deep))

    def scratch(self, rows: int) -> int:
        """Bytes that encoding a picture of `rows` rows takes beside its features."""
        return scratch_bytes(self.tower.spec, rows)

    def __call__(self, picture: Picture) -> Tensor:
        """Features [picture.rows, width] f32: the row for the embedding, then those added behind the first layers.

        They stand for embeddings that were scaled already, where a decoder scales them. `ValueError` where the picture
        was not prepared for this tower.
        """
        threads = torch.get_num_threads()
        # One thread: torch's others spin when they are done, and fight with those of the ops (0.88 s instead of 0.70).
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                found = self._features(picture)
        finally:
            torch.set_num_threads(threads)
        if len(found) != picture.rows:
            raise ValueError(f"the tower makes {len(found)} rows of a picture that has {picture.rows} in the prompt")
        return found

    def _features(self, picture: Picture) -> Tensor:
        reading = self.reading
        wanted = tuple(sorted({*reading.taps, *reading.deep}))
        kept = dict(zip(wanted, self.tower(self._pixels(picture), wanted, reading.normed), strict=True))
        rows = self._project(self.projector, [kept[tap] for tap in reading.taps])
        found = PACKINGS[reading.packing](rows, picture, reading, self.newline)
        if reading.scale != 1.0:
            found = found * reading.scale
        more = [self._project(p, [kept[tap]]).flatten(0, 1) for p, tap in zip(self.deep, reading.deep, strict=True)]
        return torch.cat((found, *more), 1).float() if more else found.float()

    def _pixels(self, picture: Picture) -> Tensor:
        """[tiles, height, width, 3] f32."""
        told, device = self.reading.pixels, self.tower.ops.device
        values = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8).view(*picture.shape, 3).to(device)
        mean, std = (torch.tensor(numbers, device=device) for numbers in (told.mean, told.std))
        return (values.float() * told.factor - mean) / std

    def _project(self, projector: Projector, kept: Sequence[Tensor]) -> Tensor:
        """[tiles, rows of a tile, hidden] of the rows of one layer, or of several side by side."""
        wide = torch.cat(tuple(kept), 2) if len(kept) > 1 else kept[0]
        rows = wide[:, self.reading.drop :].contiguous()
        return projector(rows.flatten(0, 1)).view(len(rows), -1, projector.hidden)
