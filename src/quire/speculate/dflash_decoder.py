"""The decoder of a block that is drafted at once: its rows see each other, and all that the target computed before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire.model.batch import Batch, Forward
from quire.model.net.decoder import Decoder, Layer, Wanted, own_attention, own_rows
from quire.model.net.multimodal import EmbeddedRows
from quire.model.net.parts import Norm
from quire.model.spec import Sight
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
    """A `Decoder` of blocks, which gives keys of what came before in steps whose rows are given.

    `context_norm`: of such rows, the target's hidden rows, joined. `reach`: as of `BlockAttention`.
    """

    context_norm: Norm = field(kw_only=True)
    reach: Array = field(kw_only=True)

    def with_given_rows(self, sight: Sight, given: EmbeddedRows, batch: Batch) -> Forward:
        """Implement `TakesRows`: all rows of the step are given, and only keys and values are made of them."""
        return ContextKeys(self, given.features)

    def warm_up(self, batch: Batch, caches: Sequence[LayerCache]) -> Sequence[LayerCache]:
        """Warm up as any decoder: its one sequence sees itself."""
        self.reach[: len(batch.context)] = batch.context
        return super().warm_up(batch, caches)


@dataclass(frozen=True)
class ContextKeys:
    """One step that writes the keys and values of `rows` [T, hidden]: no attention, no MLP and no logits."""

    decoder: DFlashDecoder
    rows: Array
    recordable: bool = False

    @property
    def ops(self) -> Ops:
        """The decoder's."""
        return self.decoder.ops

    def __call__(self, batch: Batch, caches: Sequence[LayerCache], views: Sequence[Batch] = ()) -> Array:
        """Nothing, [0, hidden]: no row has logits."""
        decoder, ops = self.decoder, self.ops
        h = decoder.context_norm(ops, self.rows)
        for layer, view, cache in zip(decoder.layers, views or (batch,) * len(caches), caches, strict=True):
            ops.next_layer()
            own_rows(ops, layer, h, view, cache)
        return self.rows[:0]

    def warm_up(self, batch: Batch, caches: Sequence[LayerCache]) -> Sequence[LayerCache]:
        """Warm up the decoder."""
        return self.decoder.warm_up(batch, caches)
