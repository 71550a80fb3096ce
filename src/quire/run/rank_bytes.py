"""Whole blocks of ranks that have a part of each: gathered for a store, and given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.ops.backend import Ops
from quire.parallel.comm import Comm
from quire.run.block_bytes import BlockBytes, Bytes, Later
from quire.run.caches import Caches
from quire.run.messages import Message, Receive, Send


class RankBytes:
    """`BlockBytes` of rank 0: a row has its own part, and behind it those of the others in their order."""

    def __init__(self, own: BlockBytes, others: Sequence[int], join: Joins) -> None:
        """`others`: bytes of a block on each of the other ranks."""
        self._own, self._others, self._join = own, others, join
        self.nbytes = own.nbytes + sum(others)

    def copy(self, block: int) -> Later:
        """What `block` holds now on all ranks, uint8 [nbytes]."""
        self._join.tell(Send(block))
        parts = [self._own.copy(block)()]
        for rank, nbytes in enumerate(self._others, 1):
            parts.append(received(self._join.comm, self._join.ops, nbytes, rank))
        data = np.concatenate(parts)
        return lambda: data

    def fill(self, block: int, data: Any) -> None:
        """Make `block` hold what `copy` gave."""
        row, at = np.frombuffer(data, np.uint8), self._own.nbytes
        self._join.tell(Receive(block))
        for rank, nbytes in enumerate(self._others, 1):
            sent(self._join.comm, self._join.ops, row[at : at + nbytes], rank)
            at += nbytes
        self._own.fill(block, row[: self._own.nbytes])


class Joins:
    """Rank 0's way to the others' parts of blocks: `tell` says what is to be done, `comm` carries bytes."""

    def __init__(self, tell: Callable[[Message], None], comm: Comm, ops: Ops) -> None:
        self.tell, self.comm, self.ops = tell, comm, ops

    def sizes(self) -> tuple[int, ...]:
        """Bytes of a block on each of the others, which have been told to allocate."""
        ranks = range(1, self.comm.world)
        return tuple(int(received(self.comm, self.ops, 8, rank).view(np.int64)[0]) for rank in ranks)


def say_size(caches: Caches, comm: Comm, ops: Ops) -> None:
    """Another rank's bytes of a block, for `sizes`."""
    nbytes = caches.save_to(lambda save, data: None)
    sent(comm, ops, np.array([nbytes], np.int64).view(np.uint8), 0)


def part_of(message: Send | Receive, caches: Caches, comm: Comm, ops: Ops) -> None:
    """Another rank's side of a copy."""
    assert caches.bytes is not None, "sizes were said before"
    if isinstance(message, Send):
        sent(comm, ops, caches.bytes.copy(message.block)(), 0)
    else:
        caches.bytes.fill(message.block, received(comm, ops, caches.bytes.nbytes, 0))


def sent(comm: Comm, ops: Ops, data: Bytes, to: int) -> None:
    """Bytes to a rank; `data` may be changed on return."""
    comm.send(ops, ops.share(data if data.flags.writeable else data.copy()), to)


def received(comm: Comm, ops: Ops, nbytes: int, source: int) -> Bytes:
    """So many bytes from a rank."""
    out: Bytes = np.empty(nbytes, np.uint8)
    comm.recv(ops, ops.share(out), source)
    return out
