"""Features of images: made and forgotten as plans say, and given to the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.blame import Failed, fail, of_request
from quire.core.errors import QuireError
from quire.core.images import PromptImage, grid_positions, pieces
from quire.core.plan import StepPlan
from quire.core.sequence import Sequence as TokenSequence
from quire.model.batch import Vision
from quire.model.net.multimodal import EmbeddedRows, divided
from quire.model.spec import Sight
from quire.ops.arrays import Array, concat
from quire.ops.backend import Ops
from quire.run.arrays import Arrays
from quire.run.builder import ImageChunk
from quire.run.messages import GivenRows

Rows = NDArray[np.int64]


class _ImageRows(NamedTuple):
    """Rows of a step that lie in one run of an image, `places` of their sequence, which sees up to `ends`."""

    rows: Rows
    features: Array
    positions: Rows
    places: Rows
    ends: Rows


class ImageFeatures:
    """What `vision` made, by the keys of images; the scheduler says what is kept."""

    def __init__(self, vision: Vision, sight: Sight) -> None:
        self._vision, self._sight = vision, sight
        self._kept: dict[bytes, Array] = {}
        self._errors: dict[bytes, QuireError] = {}

    def follow(self, plan: StepPlan) -> None:
        """Forget and make what `plan` says. Each image is encoded whole and alone, so its bits depend on no other."""
        for key in plan.drops:
            self._kept.pop(key, None)
            self._errors.pop(key, None)
        for image in plan.encodes:
            try:
                self._kept[image.key] = self._made(image)
            except BaseException as error:
                self._errors[image.key] = of_request(error, "images")

    def _made(self, image: PromptImage) -> Array:
        made = self._vision(image)
        if made.shape != (image.rows, self._vision.width):
            raise ValueError(f"{image.rows} rows of an image, {tuple(made.shape)} numbers of the tower")
        return made

    def given(self, seen: Sequence[ImageChunk], arrays: Arrays, seqs: int, failed: Failed) -> EmbeddedRows | None:
        """The rows of images among the chunks `seen` of a step of `seqs` sequences, whose arrays are filled; none of
        the sequences that this adds to `failed`."""
        found = list[_ImageRows]()
        for each in seen:
            try:
                found += self._pieces(each)
            except BaseException as error:
                fail(failed, each.seq, error, "images")
        if not found:
            return None
        where, mutual = np.concatenate([piece.rows for piece in found]), None
        if self._sight.mutual:
            places, ends = (np.concatenate(each) for each in ([p.places for p in found], [p.ends for p in found]))
            mutual = divided(arrays.cu_q[: seqs + 1], arrays.context[:seqs], where, places, ends)
        whole = concat([piece.features for piece in found]) if len(found) > 1 else found[0].features
        return EmbeddedRows(where, whole, np.concatenate([piece.positions for piece in found], axis=1), mutual)

    def ahead(self, seen: Sequence[ImageChunk]) -> EmbeddedRows | None:
        """The rows of images for a layer whose rows read the embedding of the token after their own, at positions of
        their own; None where `seen` has none. The features must be there (`known`)."""
        found, turns, positions = list[tuple[Rows, Array]](), list[Rows](), list[Rows]()
        for seq, start, end, at in seen:
            for image in seq.request.images:
                for row, feature, count in pieces(image, start + 1, end + 1):
                    features = self._kept[image.key][feature : feature + count]
                    found.append((np.arange(at + row, at + row + count), features))
                for row, _, count in pieces(image, start, end) if self._sight.sections else ():
                    turns.append(np.arange(at + row, at + row + count))
                    own = grid_positions(seq.request.images, start + row, start + row + count)
                    positions.append(own.astype(np.int64))
        if not found and not turns:
            return None
        none = np.zeros(0, np.int64)
        features = concat([rows for _, rows in found]) if found else np.zeros((0, self._vision.width), np.float32)
        return EmbeddedRows(
            np.concatenate([none, *(rows for rows, _ in found)]),
            features,
            np.concatenate([np.zeros((3, 0), np.int64), *positions], axis=1),
            turns=np.concatenate([none, *turns]),
        )

    def known(self, seq: TokenSequence, start: int, end: int) -> int:
        """How many tokens of `seq` from `start` on, before `end`, are text or rows whose features are there."""
        for image in seq.request.images:
            first = next((start + row for row, _, _ in pieces(image, start, end)), end)
            if image.key not in self._kept and first < end:
                return first - start
        return end - start

    def _pieces(self, seen: ImageChunk) -> list[_ImageRows]:
        """Pieces of the images of one chunk; raises the error of one that could not be encoded."""
        seq, start, end, at = seen
        found = list[_ImageRows]()
        for image in seq.request.images:
            for row, feature, count in pieces(image, start, end):
                if image.key in self._errors:
                    raise self._errors[image.key]
                first = start + row
                rows, features = np.arange(at + row, at + row + count), self._kept[image.key]
                positions, run = np.zeros((3, 0), np.int64), 0
                if self._sight.sections:
                    positions = grid_positions(seq.request.images, first, first + count).astype(np.int64)
                if self._sight.mutual:
                    run = next(sum(run) for run in image.runs if run[0] <= first < sum(run))
                places, ends = np.arange(first, first + count), np.full(count, run)
                found.append(_ImageRows(rows, features[feature : feature + count], positions, places, ends))
        return found


def told(given: EmbeddedRows, ops: Ops) -> GivenRows:
    """Features as other ranks are told of them."""
    mutual, features = given.mutual, ops.host(given.features)
    places, ends = (b"", b"") if mutual is None else (mutual.places.tobytes(), mutual.ends.tobytes())
    turns = b"" if given.turns is None else given.turns.tobytes()
    ahead = given.turns is not None
    return GivenRows(given.rows.tobytes(), features.tobytes(), given.positions.tobytes(), places, ends, turns, ahead)


def heard_rows(rows: GivenRows, arrays: Arrays, seqs: int) -> EmbeddedRows:
    """What rank 0 told of a step of `seqs` sequences, whose arrays are filled."""

    def numbers(data: bytes) -> Rows:
        return np.frombuffer(data, np.int64).copy()

    where = numbers(rows.rows)
    features = np.frombuffer(rows.features, np.float32).copy()
    features = features.reshape(len(where), -1) if len(where) else features.reshape(0, 1)
    places, ends = numbers(rows.places), numbers(rows.ends)
    mutual = divided(arrays.cu_q[: seqs + 1], arrays.context[:seqs], where, places, ends) if len(places) else None
    turns = numbers(rows.turns) if rows.ahead else None
    return EmbeddedRows(where, features, numbers(rows.positions).reshape(3, -1), mutual, turns)
