"""The bytes of whole blocks in every layer: out of the KV cache for a store, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import U8
from quire.ops.arrays import to_numpy, view_as
from quire.ops.layout import KVCache

if TYPE_CHECKING:
    from quire.ops.gpu import Gpu

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

    A row's layout is that of the device's memory: it means nothing to another layout.
    """

    def __init__(self, own: Sequence[KVCache], through: NDArray[np.int32]) -> None:
        tensors = [tensor for cache in own for tensor in (cache.keys, cache.values)]
        self._parts = [view_as(to_numpy(t), U8).reshape(len(t), -1) for t in tensors]
        self._through = through
        self.nbytes = sum(part.shape[1] for part in self._parts) + NOTE_BYTES

    def copy(self, block: int) -> Later:
        """What `block` holds now, uint8 [nbytes]."""
        data = np.empty(self.nbytes, np.uint8)
        at = 0
        for part in self._parts:
            data[at : at + part.shape[1]] = part[block]
            at += part.shape[1]
        data[at:] = self._through[block : block + 1].view(np.uint8)
        return lambda: data

    def fill(self, block: int, data: Any) -> None:
        """Make `block` hold what `copy` gave, as anything with a buffer of `nbytes` bytes."""
        row = np.frombuffer(data, np.uint8)
        at = 0
        for part in self._parts:
            part[block] = row[at : at + part.shape[1]]
            at += part.shape[1]
        self._through[block : block + 1] = row[at:].copy().view(np.int32)


class GpuBlockBytes:
    """`BlockBytes` of a GPU's memory: copies are queued where the steps are."""

    def __init__(self, own: Sequence[KVCache], through: NDArray[np.int32], gpu: Gpu) -> None:
        tensors = [tensor for cache in own for tensor in (cache.keys, cache.values)]
        self._parts: list[Any] = [view_as(t, U8).reshape(len(t), -1) for t in tensors]
        self._through, self._gpu = through, gpu
        self.nbytes = sum(part.shape[1] for part in self._parts) + NOTE_BYTES

    def copy(self, block: int) -> Later:
        """What `block` holds once what is queued now is done."""
        note = self._through[block : block + 1].copy().view(np.uint8)
        fetched = self._gpu.runtime.fetch([part[block] for part in self._parts])
        return lambda: np.concatenate([*fetched(), note])

    def fill(self, block: int, data: Any) -> None:
        """Make `block` hold what `copy` gave, for whatever is queued later."""
        row = np.frombuffer(data, np.uint8)
        sent = self._gpu.upload(row[:-NOTE_BYTES])
        copies, at = [], 0
        for part in self._parts:
            copies.append((part[block], sent[at : at + part.shape[1]]))
            at += part.shape[1]
        self._gpu.runtime.place(copies)
        self._through[block : block + 1] = row[-NOTE_BYTES:].copy().view(np.int32)
