"""The decoder of a block that is drafted at once: its rows see each other, and all that the target computed before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire.model.batch import Batch
from quire.model.net.decoder import Decoder, Layer, Wanted, own_attention, own_rows
from quire.model.net.parts import Norm
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache


@dataclass(frozen=True)
class BlockAttention:
    """`own_attention` of rows that are a sequence each: row i sees the keys of the first `reach[i]` positions.

    `reach` int32, at one address, has an entry for each row of the largest step.
    """

    reach: Array

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """Implement `own_attention`."""
        seen = replace(batch, context=self.reach[: len(batch.context)])
        return own_attention(ops, layer, h, seen, cache, wanted)


@dataclass(frozen=True)
class DFlashDecoder(Decoder):
    """A `Decoder` of blocks, which steps without rows of logits give the keys of what came before.

    `given` [rows, hidden]: the target's hidden rows of such a step, joined. `context_norm`: of them. `reach`: as of
    `BlockAttention`.
    """

    context_norm: Norm = field(kw_only=True)
    given: Array = field(kw_only=True)
    reach: Array = field(kw_only=True)

    def __call__(self, batch: Batch, caches: Sequence[LayerCache], views: Sequence[Batch] = ()) -> Array:
        """Logits f32 [R, V] of a block; where no row wants any, keys and values of `given` are written, [0, hidden]."""
        if len(batch.logit_rows):
            return super().__call__(batch, caches, views)
        ops, given = self.ops, self.given[: len(batch.tokens)]
        h = self.context_norm(ops, given)
        for layer, view, cache in zip(self.layers, views or (batch,) * len(caches), caches, strict=True):
            ops.next_layer()
            own_rows(ops, layer, h, view, cache)
        return given[:0]

    def warm_up(self, batch: Batch, caches: Sequence[LayerCache]) -> Sequence[LayerCache]:
        """Warm up as any decoder: its one sequence sees itself."""
        self.reach[: len(batch.context)] = batch.context
        return super().warm_up(batch, caches)
