"""A matrix that is still what its file holds: what is done to its rows is done to that, until it is packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.ops.arrays import Array, Host
from quire.ops.weights import BlockForm, StoredMatrix, StoredTable, Weight
from quire.quant.base import QWeight

if TYPE_CHECKING:
    from quire.ops.backend import Ops


class StoredWeight(QWeight):
    """A weight that `widen` makes of the numbers of `stored` [n, ...] once somebody asks for it.

    A backend that packs `stored` itself never asks. `label` is that of the weight. Errors of `widen` come when it is
    asked for, those of the backend when it is packed.
    """

    stored: StoredMatrix
    _label: str
    _widen: Callable[[Host], Weight]

    def __init__(self, stored: StoredMatrix, label: str, widen: Callable[[Host], Weight]) -> None:
        self.__dict__.update(stored=stored, _label=label, _widen=widen)

    @cached_property
    def weight(self) -> Weight:
        """Codes and scales."""
        return self._widen(self.stored.whole.ordered)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows n = output features, columns k = input features)."""
        return self.stored.shape

    @property
    def label(self) -> str:
        """Kind and group, for reports."""
        return self._label

    def source(self, ops: Ops) -> Weight | StoredMatrix:
        """What the file holds, if the backend packs that."""
        return self.stored if ops.packs_stored else self.weight

    def as_table(self) -> StoredTable:
        """The matrix, which lies in a file in ggml's blocks, as a table whose rows are looked up there."""
        form = self.stored.form
        assert isinstance(form, BlockForm), "asked of what `rows_in_file` says"
        numbers = np.array(form.table, np.int16) if form.table else None
        return StoredTable(form, self.stored.whole.ordered, self.stored.k, self._widen, numbers)

    def with_activations(self, bits: int) -> QWeight:
        """The weight with activations rounded to `bits` (8, as it is, or 16)."""
        return self if bits == 8 else super().with_activations(bits)

    def take_rows(self, rows: slice | Array) -> QWeight:
        """The rows `rows` (a slice, or an index [m] int64 that may permute)."""
        return self._still(self.stored.take_rows(rows))

    def slice_cols(self, start: int, stop: int) -> QWeight:
        """The columns start..stop; both must lie on group borders, otherwise `ConfigError`."""
        cut = self.stored.slice_cols(start, stop)
        return super().slice_cols(start, stop) if cut is None else self._still(cut)

    def take_cols(self, cols: NDArray[np.int64]) -> QWeight:
        """The columns in the order `cols` [k], a permutation: as they are stored where it parts no block."""
        moved = self.stored.take_cols(cols)
        return super().take_cols(cols) if moved is None else self._still(moved)

    def above(self, others: Sequence[QWeight]) -> QWeight:
        """Stack this matrix and `others` below it, as `cat_rows`."""
        stored = [w.stored for w in others if isinstance(w, StoredWeight)]
        same = all((s.form, s.k) == (self.stored.form, self.stored.k) for s in stored)
        return self._still(self.stored.below(stored)) if same and len(stored) == len(others) else super().above(others)

    def _still(self, stored: StoredMatrix) -> StoredWeight:
        return StoredWeight(stored, self.label, self._widen)
