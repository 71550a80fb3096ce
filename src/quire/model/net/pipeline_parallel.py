"""A decoder that has some of the layers: what comes in is the stream, and what goes out to the next stage.
See docs/design/pipeline-parallel.md.

Pipeline parallelism: Huang et al. 2019 (GPipe), Narayanan et al. 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.model.batch import Batch
from quire.model.net.decoder import Decoder, Wanted
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache
from quire.parallel.comm import Comm


def rows_between(ops: Ops, rows: int, hidden: int) -> Array:
    """Room for a stream [rows, hidden] f32 of this step."""
    room: Array = ops.empty(rows, hidden)
    return room


@dataclass(frozen=True)
class NoHead:
    """The head of a stage that has none."""

    def __call__(self, ops: Ops, x: Array) -> Array:
        """An error: only the last stage makes logits."""
        raise AssertionError("the last stage has the head")


@dataclass(frozen=True)
class PipelineStage(Decoder):
    """`Decoder` of the layers of one rank of `comm`; `layers`, `views` and `caches` are those of the stage alone.

    Between stages goes the stream with all that was to be added to it, [T, hidden] f32. The first stage has the table
    of tokens; the last the norm and the head, and logits. What others make in their place has no rows. `shared`: the
    head's first rows are the first stage's, which is sent what the head reads, and makes the first columns of logits
    by `part`.
    """

    comm: Comm = field(kw_only=True)
    hidden: int = field(kw_only=True)
    shared: bool = field(kw_only=True)

    @property
    def first(self) -> bool:
        """Whether no stage is before this one."""
        return self.comm.rank == 0

    @property
    def ends(self) -> bool:
        """Whether no stage is behind this one."""
        return self.comm.rank == self.comm.world - 1

    def wanted(self, batch: Batch) -> Wanted:
        """Implement `Decoder`, in the last stage; keys and values of others' layers need all rows."""
        return super().wanted(batch) if self.ends else None

    def enter(self, batch: Batch) -> Array:
        """The stream x [T, hidden] before this stage's layers."""
        if self.first:
            return super().enter(batch)
        x = self.comm.recv(self.ops, rows_between(self.ops, len(batch.tokens), self.hidden), self.comm.rank - 1)
        for change in self.embed_changes:
            x = change(self.ops, x, batch)
        return x

    def last(self, x: Array, delta: Array, batch: Batch, wanted: Wanted) -> Array:
        """Implement `Decoder`; other stages hand the stream on."""
        if self.ends:
            h = super().last(x, delta, batch, wanted)
            if self.shared:
                self.comm.send(self.ops, h, 0)
            return h
        self.comm.send(self.ops, self.ops.take_rows(x, delta, None), self.comm.rank + 1)
        return x[:0]

    def score(self, h: Array, batch: Batch) -> Array:
        """Implement `Decoder`, in the last stage."""
        return super().score(h, batch) if self.ends else h

    def part(self, h: Array, batch: Batch) -> Array:
        """The first stage's columns of the logits of what the head reads, h [R, width]."""
        return super().score(h, batch)

    def warm_up(self, batch: Batch, caches: Sequence[LayerCache]) -> Sequence[LayerCache]:
        """Implement `Decoder`, by itself."""
        x = Decoder.enter(self, batch) if self.first else self.ops.zeros((len(batch.tokens), self.hidden))
        wanted, layers = self.wanted(batch), range(min(2, len(self.layers)))
        views = self.fed(x, batch, (batch,) * len(caches))
        x, delta = self.walk(x, None, views, caches, layers, wanted)
        if self.ends:
            super().score(super().last(x, delta, batch, wanted), batch)
        return [caches[i] for i in layers]
