"""A decoder of a step in which rows of images are given instead of looked up.

Such a step comes once per chunk of a prompt with images, and is not recorded. What it changes is made around the
parts of the decoder, so that these know of no image: rows of the stream, tables of ropes, attention of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.core.windows import first_seen
from quire.model.batch import Batch, Forward
from quire.model.net.decoder import (
    Decoder,
    Layer,
    Wanted,
    chosen,
    own_attention,
    own_rows,
    reading_attention,
    reading_rows,
)
from quire.model.net.hidden_taps import TappedDecoder
from quire.model.net.tensor_parallel import TensorParallelAttention
from quire.model.spec import Sight
from quire.ops.arrays import Array, cast_to, dtype_of
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache


def put(ops: Ops, x: Any, rows: NDArray[np.int64], values: Any, add: bool = False) -> None:
    """x[rows] = values, or += them, in place and in the dtype of `x`; each row once."""
    values = cast_to(ops.put(values), dtype_of(x))
    x[rows] = x[rows] + values if add else values


@dataclass(frozen=True)
class BidirectionalSpans:
    """A step as attention sees it: each row of an image is a sequence of one row, as if it were the last of its run,
    and what lies between is one of its own.

    `cu_q` [P + 1], `context` [P] int32, as of a batch of these P; `owners` [P] int64: the sequences whose blocks they
    have. Of the rows of images: `rows` [n] int64 in the step, `parts` [n] among the P, `places` [n] in the prompt,
    `ends` [n] of their runs there.
    """

    cu_q: NDArray[np.int32]
    context: NDArray[np.int32]
    owners: NDArray[np.int64]
    rows: NDArray[np.int64]
    parts: NDArray[np.int64]
    places: NDArray[np.int64]
    ends: NDArray[np.int64]

    def farther(self, window: int) -> list[tuple[int, NDArray[np.int64]]]:
        """(how far back a row sees from the end of its run, which of the n) where that is not `window`.

        A row sees `window` tokens back from its own place, and on to the end of its run: from there it is more.
        """
        back = self.ends - first_seen(window, self.places)
        other = np.flatnonzero((self.ends > window) & (back != window))
        return [(int(seen), other[back[other] == seen]) for seen in np.unique(back[other])]


def divided(
    cu_q: NDArray[np.int32],
    context: NDArray[np.int32],
    rows: NDArray[np.int64],
    places: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> BidirectionalSpans:
    """`BidirectionalSpans` of a step of sequences `cu_q` and `context`; `rows`, `places` and `ends` of its rows of
    images."""
    starts = np.zeros(int(cu_q[-1]) + 1, bool)
    starts[cu_q] = starts[rows] = starts[rows + 1] = True
    bounds = np.flatnonzero(starts)
    firsts, lasts = bounds[:-1], bounds[1:]
    owners = np.searchsorted(cu_q, firsts, side="right") - 1
    seen = context[owners] - (cu_q[owners + 1] - lasts)
    parts = np.searchsorted(firsts, rows)
    seen[parts] = ends
    return BidirectionalSpans(
        bounds.astype(np.int32), seen.astype(np.int32), owners.astype(np.int64), rows, parts, places, ends
    )


@dataclass(frozen=True)
class BidirectionalAttention:
    """Attention of a step with rows of images. `tables`: what was made of the batch's, by group of layers; `rows`: what
    attention reads, of a layer with keys of its own or of one that reads another's."""

    mutual: BidirectionalSpans
    tables: dict[int, tuple[Array, Array, Array]]
    rows: Callable[[Ops, Layer, Array, Batch, LayerCache], Array] = own_rows

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """Implement `own_attention`."""
        qkv, spec, mutual = self.rows(ops, layer, h, batch, cache), layer.attend, self.mutual
        cu_q, context, tables = self._paged(ops, batch)
        (kv,) = cache
        attended = ops.attention(qkv, kv, cu_q, context, tables, spec, batch.tree)
        for seen, which in mutual.farther(spec.window) if spec.window else ():
            rows, parts = mutual.rows[which], mutual.parts[which]
            queries = ops.pick_rows(qkv, ops.put(rows.astype(np.int32)))
            each = ops.put(np.arange(len(rows) + 1, dtype=np.int32))
            far = replace(spec, window=seen)
            put(ops, attended, rows, ops.attention(queries, kv, each, context[parts], tables[parts], far))
        return layer.o(ops, chosen(ops, attended, wanted))

    def _paged(self, ops: Ops, batch: Batch) -> tuple[Array, Array, Array]:
        """cu_q, context and block tables of the sequences of `mutual`."""
        found = self.tables.get(id(batch.block_tables))
        if found is None:
            cu_q, context = ops.put(self.mutual.cu_q), ops.put(self.mutual.context)
            found = self.tables[id(batch.block_tables)] = cu_q, context, batch.block_tables[self.mutual.owners]
        return found


@dataclass(frozen=True)
class EmbeddedRows:
    """n of the T rows of a step, in their order, that are given instead of looked up by their tokens.

    `rows` [n] int64; `features` [n, hidden (1 + deep)] f32: the stream that the first layer reads (what decoders of
    another kind read is theirs to say), and what is added behind each of the first layers. `positions` [3, n] int64:
    time, row and column, where ropes turn by all three, else [3, 0]. `mutual`: where rows see each other. `turns` [m]
    int64: the rows that `positions` [3, m] are of, where these are others (a layer that reads the embedding of the
    token after its row's).
    """

    rows: NDArray[np.int64]
    features: Array
    positions: NDArray[np.int64]
    mutual: BidirectionalSpans | None = None
    turns: NDArray[np.int64] | None = None

    @property
    def turned(self) -> NDArray[np.int64]:
        """The rows that `positions` are of."""
        return self.rows if self.turns is None else self.turns


def axes(sight: Sight) -> NDArray[np.int64]:
    """Find for each frequency of a head which of the positions (0 time, 1 row, 2 column) turns it.

    In `sections` that follow each other (Wang et al. 2024, Qwen2-VL), or in turns as long as the sections of row and
    column last, the rest being the time's (Bai et al. 2025, Qwen3-VL).
    """
    if not sight.interleaved:
        return np.repeat(np.arange(3), sight.sections)
    found = np.arange(sum(sight.sections)) % 3
    for axis in (1, 2):
        found[3 * sight.sections[axis] :][found[3 * sight.sections[axis] :] == axis] = 0
    return found


def turned(base: Array, positions: Array, given: EmbeddedRows, axis: NDArray[np.int64]) -> Array:
    """A rope table [T, 2, r / 2] whose row t is that of row t of the step.

    `base` [P, 2, r / 2]: by position; `positions` [T] int32: of rows that are not given. The numbers are the base
    table's own, so rows of text turn as in a step without images, bit for bit.
    """
    place = given.positions[axis].T[:, None, :], np.arange(2)[:, None], np.arange(len(axis))
    table: Array = base[positions]
    table[given.turned] = base[place]
    return table


@dataclass(frozen=True)
class MultimodalDecoder(Decoder):
    """`Decoder` of one step, in which rows are `given`."""

    given: EmbeddedRows = field(kw_only=True)
    sight: Sight = field(kw_only=True)

    def enter(self, batch: Batch) -> Array:
        """Implement `Decoder`; what is changed in embedded tokens (their scale) was not in what is given."""
        x = super().enter(batch)
        put(self.ops, x, self.given.rows, self.given.features[:, : x.shape[1]])
        return x

    def walk(
        self,
        x: Array,
        delta: Array | None,
        views: Sequence[Batch],
        caches: Sequence[LayerCache],
        layers: range | None = None,
        wanted: Wanted = None,
    ) -> tuple[Array, Array]:
        """Implement `Decoder`, with further features added behind the first layers."""
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


@dataclass(frozen=True)
class TappedMultimodalDecoder(MultimodalDecoder, TappedDecoder):
    """`MultimodalDecoder` that leaves hidden rows as `TappedDecoder` does."""


@runtime_checkable
class TakesRows(Protocol):
    """A decoder of another kind that can be given rows."""

    def with_given_rows(self, sight: Sight, given: EmbeddedRows, batch: Batch) -> Forward:
        """Return the decoder for the one step `batch`, in which rows are `given`."""
        ...


def with_given_rows(decoder: Forward, sight: Sight, given: EmbeddedRows, batch: Batch) -> Forward:
    """`decoder` for the one step `batch`, in which rows are `given`."""
    if isinstance(decoder, TakesRows):
        return decoder.with_given_rows(sight, given, batch)
    assert isinstance(decoder, Decoder), "others take no images"
    layers = decoder.layers
    if sight.sections:
        axis = axes(sight)
        bases = {id(layer.rope): layer.rope for layer in layers}
        tables = {at: turned(base, batch.positions, given, axis) for at, base in bases.items()}
        layers = tuple(replace(layer, rope=tables[id(layer.rope)]) for layer in layers)
    if given.mutual is not None:
        attention = BidirectionalAttention(given.mutual, {})
        causal = [sight.windows and not layer.attend.window for layer in layers]
        layers = tuple(layer if same else _mutual(layer, attention) for layer, same in zip(layers, causal, strict=True))
    leaves = isinstance(decoder, TappedDecoder)
    own = fields(TappedDecoder if leaves else Decoder)
    parts = {f.name: getattr(decoder, f.name) for f in own} | {"layers": layers}
    parts["narrows"] = decoder.narrows and sight.deep < len(layers)  # else rows that are added to would be gone
    return (TappedMultimodalDecoder if leaves else MultimodalDecoder)(**parts, given=given, sight=sight)


ROWS = {own_attention: own_rows, reading_attention: reading_rows}


def _mutual(layer: Layer, attention: BidirectionalAttention) -> Layer:
    """`layer`, whose rows of images see each other."""
    held = layer.attention
    own = held.own if isinstance(held, TensorParallelAttention) else held
    assert own in ROWS, "rows see each other where layers have heads"
    made = replace(attention, rows=ROWS[own])
    return replace(layer, attention=replace(held, own=made) if isinstance(held, TensorParallelAttention) else made)
