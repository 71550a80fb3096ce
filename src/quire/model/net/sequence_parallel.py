"""Sequence parallelism (Korthikanti et al. 2022): between the joins each rank has its rows of a step.

A sum over ranks leaves each with its rows of it; these it norms, and the norms of all rows are what all go on with.
The stream stays a tensor of all rows, of which a rank keeps its own up to date; so bits are those of whole sums.
Steps of few rows are summed whole: two exchanges would take longer than one.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.decoder import Attend, Layer, Wanted
from quire.model.net.parts import Mlp, Norm, Product
from quire.ops.arrays import Array, address
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache
from quire.parallel.comm import Comm

FEW = 32
"""Rows of a step, for each rank, from which on they are split."""


def rows_of(total: int, world: int) -> tuple[int, ...]:
    """How many of a step's rows each rank has; none where they stay whole."""
    if total < FEW * world:
        return ()
    return tuple((rank + 1) * total // world - rank * total // world for rank in range(world))


def scattered(ops: Ops, x: Array, comm: Comm) -> Array:
    """The sum over ranks of x [T, d]: this rank's rows of it, or all where they are few."""
    rows = rows_of(len(x), comm.world)
    return comm.reduce_scatter(ops, x, rows) if rows else comm.all_reduce(ops, x)


@dataclass(frozen=True)
class SequenceParallelAttention:
    """Each rank's heads, through its columns of the output matrix."""

    own: Attend
    comm: Comm

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """Implement `own_attention`, of this rank's rows."""
        return scattered(ops, self.own(ops, layer, h, batch, cache, wanted), self.comm)


@dataclass(frozen=True)
class SequenceParallelMlp:
    """Each rank's columns of the hidden layer, or of each expert's."""

    own: Mlp
    comm: Comm

    def __call__(self, ops: Ops, h: Array) -> Array:
        """h [T, hidden] -> this rank's rows of [T, hidden]."""
        return scattered(ops, self.own(ops, h), self.comm)


@dataclass(frozen=True)
class SequenceParallelLinear:
    """Each rank's columns of a matrix, with its columns of x."""

    own: Product
    comm: Comm

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, its columns] -> this rank's rows of [T, n]."""
        return scattered(ops, self.own(ops, x), self.comm)


@dataclass(frozen=True)
class SequenceParallelNorm:
    """The norm of all rows, each rank's by itself. `whole`: the stream is that of all rows from here on, too."""

    norm: Norm
    comm: Comm
    whole: bool = False

    def __call__(self, ops: Ops, x: Array) -> Array:
        """The norm of x [T, hidden], of which this rank's rows are up to date."""
        rows = rows_of(len(x), self.comm.world)
        return self.comm.all_gather(ops, self.norm(ops, self._own(x, rows)), rows) if rows else self.norm(ops, x)

    def add(self, ops: Ops, x: Array, delta: Array) -> tuple[Array, Array]:
        """(x + delta, its norm); x [T, hidden] is given up, delta is of this rank's rows."""
        rows = rows_of(len(x), self.comm.world)
        if not rows:
            return self.norm.add(ops, x, delta)
        own = self._own(x, rows)
        added, normed = self.norm.add(ops, own, delta)
        if self.whole:
            return self.comm.all_gather(ops, added, rows), self.comm.all_gather(ops, normed, rows)
        if address(added) != address(own):
            ops.place_columns(own, added, 0)
        return x, self.comm.all_gather(ops, normed, rows)

    def _own(self, x: Array, rows: tuple[int, ...]) -> Array:
        first = sum(rows[: self.comm.rank])
        return x[first : first + rows[self.comm.rank]]
