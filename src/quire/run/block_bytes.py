"""The bytes of whole blocks in every layer: out of the KV cache for a store, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import U8
from quire.ops.arrays import view_as
from quire.ops.backend import Ops
from quire.ops.layout import KVCache

Bytes = NDArray[np.uint8]
Later = Callable[[], Bytes]
"""Waits for a copy, and returns it."""
NOTE_BYTES = 4


class WholeBlocks(Protocol):
    """What `BlockBytes` does, wherever the parts of a block are."""

    nbytes: int

    def copy(self, block: int) -> Later:
        """What `block` holds now, uint8 [nbytes]."""
        ...

    def fill(self, block: int, data: Any) -> None:
        """Make `block` hold what `copy` gave."""
        ...


class BlockBytes:
    """Copies blocks of `own` to and from rows of bytes: each layer's keys and values, and `through` of the block.

    A row's layout is that of the device's memory: it means nothing to another layout. On a device copies are queued
    where the steps are: a block is copied as it is once what is queued now is done, and filled for what comes later.
    """

    def __init__(self, own: Sequence[KVCache], through: NDArray[np.int32], ops: Ops) -> None:
        arrays = [array for cache in own for array in (cache.keys, cache.values)]
        self._parts = [view_as(array, U8).reshape(len(array), -1) for array in arrays]
        self._through, self._ops = through, ops
        self.nbytes: int = sum(part.shape[1] for part in self._parts) + NOTE_BYTES

    def copy(self, block: int) -> Later:
        """What `block` holds, uint8 [nbytes]."""
        note = self._through[block : block + 1].view(np.uint8)
        return self._ops.gather([part[block] for part in self._parts], note)

    def fill(self, block: int, data: Any) -> None:
        """Make `block` hold what `copy` gave, as anything with a buffer of `nbytes` bytes."""
        row = np.frombuffer(data, np.uint8)
        self._ops.scatter([part[block] for part in self._parts], row[:-NOTE_BYTES])
        self._through[block : block + 1] = row[-NOTE_BYTES:].copy().view(np.int32)
