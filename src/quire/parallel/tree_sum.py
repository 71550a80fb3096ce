"""Sums over ranks as a balanced tree."""

from __future__ import annotations

from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.parallel.comm import Comm


class TreeComm:
    """`comm` whose sums add neighbours, then neighbours of these sums: a rank that adds its own parts so makes a branch
    of the same tree, so that the bits do not depend on how many ranks there are, a power of two.

    All parts come to all ranks, which costs `world` times the memory of one.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm, self.rank, self.world, self.recordable = comm, comm.rank, comm.world, comm.recordable

    @property
    def waited_s(self) -> float:
        """Implement `Comm`."""
        return self._comm.waited_s

    def all_reduce(self, ops: Ops, x: Array) -> Array:
        """Implement `Comm`, but for the order; the sum is in a new place."""
        count = len(x)
        found = self._comm.all_gather(ops, x, (count,) * self.world)
        parts = [found[i * count : (i + 1) * count] for i in range(self.world)]
        while len(parts) > 1:
            parts = [ops.add(left, right) for left, right in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def reduce_scatter(self, ops: Ops, x: Array, rows: tuple[int, ...]) -> Array:
        """Implement `Comm`, but for the order."""
        first = sum(rows[: self.rank])
        return self.all_reduce(ops, x)[first : first + rows[self.rank]]

    def all_gather(self, ops: Ops, x: Array, rows: tuple[int, ...]) -> Array:
        """Implement `Comm`."""
        return self._comm.all_gather(ops, x, rows)

    def gather_columns(self, ops: Ops, x: Array, widths: tuple[int, ...]) -> Array:
        """Implement `Comm`."""
        return self._comm.gather_columns(ops, x, widths)

    def all_to_all(self, ops: Ops, x: Array, sends: Array, most: int) -> tuple[Array, Array]:
        """Implement `Comm`."""
        return self._comm.all_to_all(ops, x, sends, most)

    def broadcast(self, ops: Ops, x: Array, root: int) -> Array:
        """Implement `Comm`."""
        return self._comm.broadcast(ops, x, root)

    def send(self, ops: Ops, x: Array, to: int) -> None:
        """Implement `Comm`."""
        self._comm.send(ops, x, to)

    def recv(self, ops: Ops, out: Array, source: int) -> Array:
        """Implement `Comm`."""
        return self._comm.recv(ops, out, source)

    def leave(self) -> None:
        """Implement `Comm`."""
        self._comm.leave()
