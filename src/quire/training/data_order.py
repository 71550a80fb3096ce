"""The order in which rows of text are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Shuffled(Generic[T]):
    """An endless order of `rows`, each pass of which is shuffled anew; a place in it has the same row in every run."""

    def __init__(self, rows: Sequence[T], seed: int) -> None:
        self._rows, self._seed = rows, seed

    def __getitem__(self, place: int) -> T:
        """Row number `place`."""
        turn, at = divmod(place, len(self._rows))
        order = torch.randperm(len(self._rows), generator=torch.Generator().manual_seed(self._seed * 7919 + turn))
        return self._rows[int(order[at])]
