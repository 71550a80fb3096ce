"""A decoder of a step in which rows of pictures are given instead of looked up.

Such a step comes once per chunk of a prompt with pictures, and is not recorded. What it changes is made around the
parts of the decoder, so that these know of no picture: rows of the stream, tables of ropes, attention of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from quire.model.batch import Batch
from quire.model.net.decoder import Decoder, Layer, Wanted, own_attention
from quire.model.net.joined import SummedAttention
from quire.model.net.mutual import Mutual, MutualAttention, put
from quire.model.spec import Sight
from quire.ops.arrays import Array
from quire.ops.layout import KVCache


@dataclass(frozen=True)
class Given:
    """n of the T rows of a step, in their order.

    `rows` [n] int64; `features` [n, hidden (1 + deep)] f32: the stream that the first layer reads, and what is added
    behind each of the first layers. `positions` [3, n] int64: time, row and column, where ropes turn by all three, else
    [3, 0]. `mutual`: where rows see each other.
    """

    rows: NDArray[np.int64]
    features: Array
    positions: NDArray[np.int64]
    mutual: Mutual | None = None


def axes(sight: Sight) -> NDArray[np.int64]:
    """Of each frequency of a head which of the positions (0 time, 1 row, 2 column) turns it.

    In `sections` that follow each other (Wang et al. 2024, Qwen2-VL), or in turns as long as the sections of row and
    column last, the rest being the time's (Bai et al. 2025, Qwen3-VL).
    """
    if not sight.interleaved:
        return np.repeat(np.arange(3), sight.sections)
    found = np.arange(sum(sight.sections)) % 3
    for axis in (1, 2):
        found[3 * sight.sections[axis] :][found[3 * sight.sections[axis] :] == axis] = 0
    return found


def turned(base: Array, positions: Array, given: Given, axis: NDArray[np.int64]) -> Array:
    """A rope table [T, 2, r / 2] whose row t is that of row t of the step.

    `base` [P, 2, r / 2]: by position; `positions` [T] int32: of rows that are not given. The numbers are the base
    table's own, so rows of text turn as in a step without pictures, bit for bit.
    """
    place = given.positions[axis].T[:, None, :], np.arange(2)[:, None], np.arange(len(axis))
    table: Array = base[positions]
    table[given.rows] = base[place]
    return table


@dataclass(frozen=True)
class SeeingDecoder(Decoder):
    """`Decoder` of one step, in which rows are `given`."""

    given: Given = field(kw_only=True)
    sight: Sight = field(kw_only=True)

    def enter(self, batch: Batch) -> Array:
        """As of `Decoder`; what is changed in embedded tokens (their scale) was not in what is given."""
        x = super().enter(batch)
        put(self.ops, x, self.given.rows, self.given.features[:, : x.shape[1]])
        return x

    def walk(
        self,
        x: Array,
        delta: Array | None,
        views: Sequence[Batch],
        caches: Sequence[KVCache],
        layers: range | None = None,
        wanted: Wanted = None,
    ) -> tuple[Array, Array]:
        """As of `Decoder`, with further features added behind the first layers."""
        layers, hidden = range(len(self.layers)) if layers is None else layers, x.shape[1]
        if self.sight.sections:
            places = self.ops.put(np.arange(len(views[0].tokens), dtype=np.int32))
            known = {id(view): replace(view, positions=places) for view in views}
            views = [known[id(view)] for view in views]
        deep = range(layers.start, min(layers.stop, self.sight.deep))
        for i in deep:
            last = wanted if i + 1 == layers.stop else None
            x, delta = super().walk(x, delta, views, caches, range(i, i + 1), last)
            more = self.given.features[:, hidden * (i + 1) : hidden * (i + 2)]
            put(self.ops, delta, self.given.rows, more, add=True)
        rest = range(max(deep.stop, layers.start), layers.stop)
        if rest:
            return super().walk(x, delta, views, caches, rest, wanted)
        assert delta is not None, "a walk has layers"
        return x, delta


def seeing(decoder: Decoder, sight: Sight, given: Given, batch: Batch) -> SeeingDecoder:
    """`decoder` for the one step `batch`, in which rows are `given`."""
    layers = decoder.layers
    if sight.sections:
        axis = axes(sight)
        bases = {id(layer.rope): layer.rope for layer in layers}
        tables = {at: turned(base, batch.positions, given, axis) for at, base in bases.items()}
        layers = tuple(replace(layer, rope=tables[id(layer.rope)]) for layer in layers)
    if given.mutual is not None:
        attention = MutualAttention(given.mutual, {})
        layers = tuple(_mutual(layer, attention) for layer in layers)
    parts = {f.name: getattr(decoder, f.name) for f in fields(Decoder)} | {"layers": layers}
    parts["narrows"] = decoder.narrows and sight.deep < len(layers)  # else rows that are added to would be gone
    return SeeingDecoder(**parts, given=given, sight=sight)


def _mutual(layer: Layer, attention: MutualAttention) -> Layer:
    """`layer` with its own keys, whose rows of pictures see each other."""
    if isinstance(layer.attention, SummedAttention):
        return replace(layer, attention=replace(layer.attention, own=attention))
    assert layer.attention is own_attention, "rows see each other where layers have keys of their own"
    return replace(layer, attention=attention)
