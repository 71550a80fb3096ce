"""The bytes of blocks and of recurrent states, as a store keeps them: of this process, and of all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import U8
from quire.ops.arrays import Array, view_as
from quire.ops.backend import Ops
from quire.ops.layout import KVCache
from quire.parallel.comm import Comm
from quire.run.blocks import BlockBytes, Bytes, Later, StoredBytes
from quire.run.caches import Caches

NOTE_BYTES = 4
NO_NOTE: Bytes = np.empty(0, np.uint8)


class OwnBytes:
    """Copies blocks of `own`, which are in this process, to and from rows of bytes: each layer's keys and values, and
    `through` of the block.

    A row's layout is that of the device's memory: it means nothing to another layout. On a device copies are queued
    where the steps are: a block is copied as it is once what is queued now is done, and filled for what comes later.
    """

    def __init__(self, own: Sequence[KVCache], through: NDArray[np.int32], ops: Ops) -> None:
        arrays = [array for cache in own for array in cache.arrays]
        self._parts = [view_as(array, U8).reshape(len(array), -1) for array in arrays]
        self._through, self._ops = through, ops
        self.nbytes: int = sum(part.shape[1] for part in self._parts) + NOTE_BYTES

    def copy(self, block: int) -> Later:
        """What `block` holds."""
        note = self._through[block : block + 1].view(np.uint8)
        return self._ops.gather([part[block] for part in self._parts], note)

    def fill(self, block: int, data: Any) -> None:
        """Make `block` hold what `copy` gave."""
        row = np.frombuffer(data, np.uint8)
        self._ops.scatter([part[block] for part in self._parts], row[:-NOTE_BYTES])
        self._through[block : block + 1] = row[-NOTE_BYTES:].copy().view(np.int32)


class StateBytes:
    """Copies slots of recurrent states, of the layers with `states` f32 [slots, ...], to and from rows of bytes."""

    def __init__(self, states: Sequence[Array], ops: Ops) -> None:
        self._parts, self._ops = [view_as(array, U8).reshape(len(array), -1) for array in states], ops
        self.nbytes: int = sum(part.shape[1] for part in self._parts)

    def copy(self, block: int) -> Later:
        """What the slot holds."""
        return self._ops.gather([part[block] for part in self._parts], NO_NOTE)

    def fill(self, block: int, data: Any) -> None:
        """Make the slot hold what `copy` gave."""
        self._ops.scatter([part[block] for part in self._parts], np.frombuffer(data, np.uint8))


def own_bytes(caches: Caches, ops: Ops) -> StoredBytes:
    """The bytes of what this process has of the cache."""
    states = StateBytes(caches.states, ops) if caches.states else None
    return StoredBytes(OwnBytes(caches.own, caches.through, ops), states)


class JoinedBytes:
    """Rank 0's, where each rank has a part of a block: a row has its own, and behind it the others' in their order.

    The others are told of the same work, and have `SharedBytes`.
    """

    def __init__(self, own: BlockBytes, others: Sequence[int], comm: Comm, ops: Ops) -> None:
        """`others`: bytes of a block on each of the other ranks."""
        self._own, self._others, self._comm, self._ops = own, others, comm, ops
        self.nbytes = own.nbytes + sum(others)

    def copy(self, block: int) -> Later:
        """What `block` holds now on all ranks."""
        parts = [self._own.copy(block)()]
        for rank, nbytes in enumerate(self._others, 1):
            parts.append(received(self._comm, self._ops, nbytes, rank))
        data = np.concatenate(parts)
        return lambda: data

    def fill(self, block: int, data: Any) -> None:
        """Make `block` hold what `copy` gave."""
        row, at = np.frombuffer(data, np.uint8), self._own.nbytes
        for rank, nbytes in enumerate(self._others, 1):
            sent(self._comm, self._ops, row[at : at + nbytes], rank)
            at += nbytes
        self._own.fill(block, row[: self._own.nbytes])


class SharedBytes:
    """Another rank's part of blocks, which goes to rank 0 and comes from there."""

    def __init__(self, own: BlockBytes, comm: Comm, ops: Ops) -> None:
        self._own, self._comm, self._ops, self.nbytes = own, comm, ops, own.nbytes

    def copy(self, block: int) -> Later:
        """Send what `block` holds now."""
        data = self._own.copy(block)()
        sent(self._comm, self._ops, data, 0)
        return lambda: data

    def fill(self, block: int, data: Any) -> None:
        """Make `block` hold what rank 0 sends."""
        self._own.fill(block, received(self._comm, self._ops, self.nbytes, 0))


def shared_bytes(own: StoredBytes, comm: Comm, ops: Ops) -> StoredBytes:
    """Another rank's, of which rank 0 asks."""
    states = None if own.states is None else SharedBytes(own.states, comm, ops)
    return StoredBytes(SharedBytes(own.blocks, comm, ops), states)


def joined_bytes(own: StoredBytes, comm: Comm, ops: Ops) -> StoredBytes:
    """Rank 0's, once each of the others has said its sizes (`say_sizes`)."""
    said = [received(comm, ops, 16, rank).view(np.int64) for rank in range(1, comm.world)]
    blocks, states = [int(each[0]) for each in said], [int(each[1]) for each in said]
    joined = None if own.states is None else JoinedBytes(own.states, states, comm, ops)
    return StoredBytes(JoinedBytes(own.blocks, blocks, comm, ops), joined)


def say_sizes(stored: StoredBytes, comm: Comm, ops: Ops) -> None:
    """Tell rank 0 this rank's bytes of a block, and of a slot of states."""
    sent(comm, ops, np.array(stored.sizes, np.int64).view(np.uint8), 0)


def sent(comm: Comm, ops: Ops, data: Bytes, to: int) -> None:
    """Send bytes to a rank; `data` may be changed on return."""
    comm.send(ops, ops.share(data if data.flags.writeable else data.copy()), to)


def received(comm: Comm, ops: Ops, nbytes: int, source: int) -> Bytes:
    """Receive so many bytes from a rank."""
    out: Bytes = np.empty(nbytes, np.uint8)
    comm.recv(ops, ops.share(out), source)
    return out
