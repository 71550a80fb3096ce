"""Parts of a layer whose weights are split over ranks: what they have of a result is joined with what others have.
See docs/design/ranks.md.

A row's product with a matrix that is split by columns is a sum over ranks, one of rows lies beside those of others
(Megatron-LM, Shoeybi et al. 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.decoder import Attend, Layer, ToLogits, Wanted
from quire.model.net.parts import Embedding, Mlp, Product
from quire.model.net.scan import GatedNorm
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache
from quire.parallel.comm import Comm


@dataclass(frozen=True)
class TensorParallelAttention:
    """Each rank's heads, through its columns of the output matrix."""

    own: Attend
    comm: Comm

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """Implement `own_attention`."""
        return self.comm.all_reduce(ops, self.own(ops, layer, h, batch, cache, wanted))


@dataclass(frozen=True)
class TensorParallelMlp:
    """Each rank's columns of the hidden layer, or of each expert's."""

    own: Mlp
    comm: Comm

    def __call__(self, ops: Ops, h: Array) -> Array:
        """h [T, hidden] -> [T, hidden]."""
        return self.comm.all_reduce(ops, self.own(ops, h))


@dataclass(frozen=True)
class RowParallelLinear:
    """Each rank's columns of a matrix, with its columns of x."""

    own: Product
    comm: Comm

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, its columns] -> [T, n]."""
        return self.comm.all_reduce(ops, self.own(ops, x))


@dataclass(frozen=True)
class VocabParallelEmbedding:
    """Each rank's rows of the table of tokens: those of the others' tokens are -0, and x + -0 is x for every x."""

    own: Embedding
    comm: Comm

    def __call__(self, ops: Ops, tokens: Array) -> Array:
        """tokens [T] int32 -> [T, width]."""
        return self.comm.all_reduce(ops, self.own(ops, tokens))


@dataclass(frozen=True)
class TensorParallelNorm:
    """A norm of rows whose columns `start` on are one rank's `widths[rank]` of all; `weight` is of all."""

    weight: Array
    start: int
    widths: tuple[int, ...]
    centered: bool
    eps: float
    comm: Comm

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """x [T, width], these columns normed in place."""
        own, before = self.widths[self.comm.rank], sum(self.widths[: self.comm.rank])
        rows = self.comm.gather_columns(ops, ops.take_columns(x, self.start, own), self.widths)
        rows = ops.norm_spans(rows, self.weight, 0, sum(self.widths), self.centered, self.eps)
        normed: Array = ops.place_columns(x, ops.take_columns(rows, before, own), self.start)
        return normed


@dataclass(frozen=True)
class TensorParallelGating:
    """The gate and norm of a scan's result whose channels, `widths[rank]` of each rank, are normed together; `whole` is
    of all."""

    whole: GatedNorm
    widths: tuple[int, ...]
    comm: Comm

    def __call__(self, ops: Ops, x: Array, gate: Array) -> Array:
        """x and gate [T, own width] -> [T, own width]."""
        own, before = self.widths[self.comm.rank], sum(self.widths[: self.comm.rank])
        rows, gates = (self.comm.gather_columns(ops, part, self.widths) for part in (x, gate))
        return ops.take_columns(self.whole(ops, rows, gates), before, own)


@dataclass(frozen=True)
class VocabParallelHead:
    """Each rank's rows of the vocabulary, `widths` of them."""

    own: ToLogits
    comm: Comm
    widths: tuple[int, ...]

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [R, hidden] -> logits [R, V]."""
        return self.comm.gather_columns(ops, self.own(ops, x), self.widths)


def tree_sum(ops: Ops, parts: list[Array]) -> Array:
    """Neighbours are added, then neighbours of these sums: parts, a power of two of them, are given up."""
    while len(parts) > 1:
        parts = [ops.add(left, right) for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@dataclass(frozen=True)
class RankInvariantMlp:
    """An MLP, or experts, each of whose `parts` has a run of the hidden layer's columns. `writes`: a part writes to the
    rows that it reads, so that all but the last are given a copy."""

    parts: tuple[Mlp, ...]
    writes: bool = False

    def __call__(self, ops: Ops, h: Array) -> Array:
        """h [T, hidden], which is given up where parts write to it -> [T, hidden]."""
        *before, last = self.parts
        made = [part(ops, ops.take_columns(h, 0, h.shape[1]) if self.writes else h) for part in before]
        return tree_sum(ops, [*made, last(ops, h)])


@dataclass(frozen=True)
class RankInvariantLinear:
    """A matrix each of whose `parts` has a run of `width` columns."""

    parts: tuple[Product, ...]
    width: int

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, parts * width] -> [T, n]."""
        columns = [ops.take_columns(x, i * self.width, self.width) for i in range(len(self.parts))]
        return tree_sum(ops, [part(ops, run) for part, run in zip(self.parts, columns, strict=True)])
