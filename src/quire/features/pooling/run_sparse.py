"""Sparse vectors of pooled requests: weights of the vocabulary's tokens, made from the logits of all rows of a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from quire.core.blame import Failed
from quire.core.plan import LogitRow
from quire.core.pooling import Splade
from quire.core.sequence import Sequence as Tokens
from quire.sample.sampler import NUMERICS

Weights = NDArray[np.float64]


class SparseSums:
    """Weights of the texts of one step, taken from logits that come in pieces: which pieces changes no bit, since rows
    are added in order."""

    def __init__(self, splade: Splade) -> None:
        self.splade = splade
        self.found: dict[Tokens, Weights] = {}

    def add(self, rows: Sequence[LogitRow], logits: NDArray[np.float32]) -> None:
        """Take the `logits` [n, V] f32 of `rows`, those of a text one behind the other."""
        at = 0
        for seq, own in groupby(rows, lambda row: row.seq):
            count = len(list(own))
            self._take(seq, logits[at : at + count])
            at += count

    def _take(self, seq: Tokens, logits: NDArray[np.float32]) -> None:
        if not self.splade.sums:  # the activation grows with the logit: that of the largest is the largest
            most = np.maximum.reduce(logits, axis=0).astype(np.float64)
            before = self.found.get(seq)
            self.found[seq] = most if before is None else np.maximum(before, most)
            return
        total = self.found.setdefault(seq, np.zeros(logits.shape[1]))
        for row in logits:
            total += activated(self.splade, row.astype(np.float64))

    def keep(self, failed: Failed) -> int:
        """Give each sequence its vector, `packed`; one with inf or NaN is put into `failed`. Returns how many are."""
        wrong = 0
        for seq, weights in self.found.items():
            if np.isfinite(weights).all():
                seq.pooled = packed(weights if self.splade.sums else activated(self.splade, weights))
            else:
                failed[seq], wrong = NUMERICS, wrong + 1
        return wrong


def activated(splade: Splade, logits: Weights) -> Weights:
    """log(1 + relu(logit)), and the logarithm once more where the model asks for it."""
    made = np.log1p(np.maximum(logits, 0.0))
    return np.log1p(made) if splade.twice else made


def packed(weights: Weights) -> bytes:
    """How many weights [V] are above 0, their places, ascending, both int32, and these weights f32."""
    made = weights.astype(np.float32)
    places = np.flatnonzero(made).astype(np.int32)
    return np.int32(len(places)).tobytes() + places.tobytes() + made[places].tobytes()


def take_logits(sums: SparseSums, rows: Sequence[LogitRow], pieces: Iterable[NDArray[np.float32]]) -> None:
    """Add logits that come in `pieces`, which together have one for each of `rows`, in order."""
    at = 0
    for piece in pieces:
        sums.add(rows[at : at + len(piece)], piece)
        at += len(piece)
