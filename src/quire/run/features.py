"""Features of pictures: made and forgotten as plans say, and given to the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.pictures import grid_positions, pieces
from quire.core.plan import StepPlan
from quire.model.batch import Vision
from quire.model.net.mutual import divided
from quire.model.net.seeing import Given
from quire.model.spec import Sight
from quire.run.arrays import Arrays
from quire.run.builder import Seen
from quire.run.messages import GivenRows

Rows = NDArray[np.int64]


class Features:
    """What `vision` made, by the keys of pictures; the scheduler says what is kept."""

    def __init__(self, vision: Vision, sight: Sight) -> None:
        self._vision, self._sight = vision, sight
        self._kept: dict[bytes, Tensor] = {}

    def follow(self, plan: StepPlan) -> None:
        """Forget and make what `plan` says. Each picture is encoded whole and alone, so its bits depend on no other."""
        for key in plan.drops:
            del self._kept[key]
        for picture in plan.encodes:
            made = self._vision(picture)
            if made.shape != (picture.rows, self._vision.width):
                raise ValueError(f"{picture.rows} rows of a picture, {tuple(made.shape)} numbers of the tower")
            self._kept[picture.key] = made

    def given(self, seen: Sequence[Seen], arrays: Arrays, seqs: int) -> Given | None:
        """The rows of pictures among the chunks `seen` of a step of `seqs` sequences, whose arrays are filled."""
        rows, features, positions = list[Rows](), list[Tensor](), [np.zeros((3, 0), np.int64)]
        places, ends = list[Rows](), list[Rows]()
        for seq, start, end, at in seen:
            for picture in seq.pictures:
                for row, feature, count in pieces(picture, start, end):
                    first = start + row
                    rows.append(np.arange(at + row, at + row + count))
                    features.append(self._kept[picture.key][feature : feature + count])
                    if self._sight.sections:
                        positions.append(grid_positions(seq.pictures, first, first + count).astype(np.int64))
                    if self._sight.mutual:
                        run = next(sum(run) for run in picture.runs if run[0] <= first < sum(run))
                        places.append(np.arange(first, first + count))
                        ends.append(np.full(count, run))
        if not rows:
            return None
        where, mutual = np.concatenate(rows), None
        if self._sight.mutual:
            cu_q, context = arrays.cu_q[: seqs + 1], arrays.context[:seqs]
            mutual = divided(cu_q, context, where, np.concatenate(places), np.concatenate(ends))
        whole = torch.cat(features) if len(features) > 1 else features[0]
        return Given(where, whole, np.concatenate(positions, axis=1), mutual)


def told(given: Given) -> GivenRows:
    """As other ranks are told."""
    mutual, features = given.mutual, given.features.cpu().numpy()
    places, ends = (b"", b"") if mutual is None else (mutual.places.tobytes(), mutual.ends.tobytes())
    return GivenRows(given.rows.tobytes(), features.tobytes(), given.positions.tobytes(), places, ends)


def heard_rows(rows: GivenRows, arrays: Arrays, seqs: int) -> Given:
    """What rank 0 told of a step of `seqs` sequences, whose arrays are filled."""

    def numbers(data: bytes) -> Rows:
        return np.frombuffer(data, np.int64).copy()

    where = numbers(rows.rows)
    features = torch.from_numpy(np.frombuffer(rows.features, np.float32).reshape(len(where), -1).copy())
    places, ends = numbers(rows.places), numbers(rows.ends)
    mutual = divided(arrays.cu_q[: seqs + 1], arrays.context[:seqs], where, places, ends) if len(places) else None
    return Given(where, features, numbers(rows.positions).reshape(3, -1), mutual)
