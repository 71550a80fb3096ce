"""The decoder of one layer that drafts from hidden rows (EAGLE, multi-token prediction), as any model's: tokens to
logits, keys and values in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from quire.model.batch import Batch
from quire.model.net.decoder import Layer, ToLogits, sequential_block
from quire.model.net.multimodal import EmbeddedRows, axes, put, turned
from quire.model.net.parts import Embed, Linear, Norm
from quire.model.spec import Sight
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache


class EagleInput(Protocol):
    """How embedded tokens and hidden rows, [T, hidden] both, become the stream x and what the layer reads, h."""

    def __call__(self, ops: Ops, embedded: Array, hidden: Array) -> tuple[Array, Array]:
        """(x [T, hidden], h [T, columns of the layer's qkv])."""
        ...


@dataclass(frozen=True)
class Eagle1Input:
    """x = h = fc([embedding, hidden]) (EAGLE), whose layer has no norm before attention."""

    fc: Linear

    def __call__(self, ops: Ops, embedded: Array, hidden: Array) -> tuple[Array, Array]:
        """Join embeddings and hidden rows in one tensor."""
        x = self.fc(ops, ops.join_columns((embedded, hidden)))
        return x, x


@dataclass(frozen=True)
class Eagle3Input:
    """x = hidden, h = [norm(embedding), norm(hidden)] (EAGLE-3)."""

    token_norm: Norm
    hidden_norm: Norm

    def __call__(self, ops: Ops, embedded: Array, hidden: Array) -> tuple[Array, Array]:
        """x is a copy: blocks change the stream in place."""
        h = ops.join_columns((self.token_norm(ops, embedded), self.hidden_norm(ops, hidden)))
        return ops.join_columns((hidden,)), h


@dataclass(frozen=True)
class MtpInput:
    """x = join([norm(embedding), norm(hidden)]), h = the layer's own norm of x (multi-token prediction).

    `hidden_first`: the join reads [norm(hidden), norm(embedding)].
    """

    token_norm: Norm
    hidden_norm: Norm
    join: Linear
    layer_norm: Norm
    hidden_first: bool = False

    def __call__(self, ops: Ops, embedded: Array, hidden: Array) -> tuple[Array, Array]:
        """Join both in one tensor."""
        both = self.token_norm(ops, embedded), self.hidden_norm(ops, hidden)
        x = self.join(ops, ops.join_columns(both[::-1] if self.hidden_first else both))
        return x, self.layer_norm(ops, x)


@dataclass(frozen=True)
class GivenEmbedding:
    """`embed`, but for the rows that are `given`."""

    embed: Embed
    given: EmbeddedRows

    def __call__(self, ops: Ops, tokens: Array) -> Array:
        """Embed `tokens`; rows of the batch [T, hidden]."""
        x = self.embed(ops, tokens)
        put(ops, x, self.given.rows, self.given.features[:, : x.shape[1]])
        return x


@dataclass(frozen=True)
class EagleDecoder:
    """Reads the first rows of `given`, a hidden row for each of the batch, and leaves its own in `kept`.

    Both are [rows, hidden]. `norm`: of what `head` reads. `keeps_normed`: what it leaves is that, not the stream.
    `turned`: the table of the rope has a row for each row of the batch.
    """

    ops: Ops
    embed: Embed
    entry: EagleInput
    layer: Layer
    norm: Norm
    head: ToLogits
    given: Array
    kept: Array
    keeps_normed: bool = False
    turned: bool = False
    recordable: bool = True

    def __call__(self, batch: Batch, caches: Sequence[LayerCache], views: Sequence[Batch] = ()) -> Array:
        """Logits f32 [R, tokens it knows] of the rows `batch.logit_rows`."""
        ops, count = self.ops, len(batch.tokens)
        x, h = self.entry(ops, self.embed(ops, batch.tokens), self.given[:count])
        ops.next_layer()
        view = views[0] if views else batch
        if self.turned:
            view = replace(view, positions=ops.put(np.arange(count, dtype=np.int32)))
        x, delta = sequential_block(ops, self.layer, x, h, view, caches[0], None)
        rows = ops.take_rows(x, delta, None)
        ops.place_columns(self.kept, self.norm(ops, rows) if self.keeps_normed else rows, 0)
        logits: Array = self.head(ops, self.norm(ops, ops.take_rows(x, delta, batch.logit_rows)))
        return logits

    def with_given_rows(self, sight: Sight, given: EmbeddedRows, batch: Batch) -> EagleDecoder:
        """Implement `TakesRows`: rows of images are given in the place of embedded tokens."""
        layer = self.layer
        if sight.sections:
            layer = replace(layer, rope=turned(layer.rope, batch.positions, given, axes(sight)))
        return replace(self, embed=GivenEmbedding(self.embed, given), layer=layer, turned=bool(sight.sections))

    def warm_up(self, batch: Batch, caches: Sequence[LayerCache]) -> Sequence[LayerCache]:
        """Warm up the whole decoder: it has one layer."""
        self(batch, caches)
        return caches
