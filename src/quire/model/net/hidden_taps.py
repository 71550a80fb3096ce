"""A decoder that leaves hidden rows of each step where others read them: what heads that guess ahead begin with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

from quire.model.batch import Batch
from quire.model.net.decoder import Decoder, Wanted
from quire.ops.arrays import Array
from quire.ops.layout import LayerCache


@dataclass(frozen=True)
class Taps:
    """Which rows: the stream before each of `layers`, beside each other, or, with none, what the head reads.

    `every`: of all rows of the step, in its order; otherwise of those that want logits, in theirs.
    """

    layers: tuple[int, ...] = ()
    every: bool = False

    def width(self, hidden: int) -> int:
        """Numbers of a row, for a stream of `hidden`."""
        return hidden * max(1, len(self.layers))


@dataclass(frozen=True)
class TappedDecoder(Decoder):
    """`Decoder` with the same bits, which copies what `taps` says to the first rows of `kept` [rows, width] f32."""

    taps: Taps = field(kw_only=True)
    kept: Array = field(kw_only=True)

    def walk(
        self,
        x: Array,
        delta: Array | None,
        views: Sequence[Batch],
        caches: Sequence[LayerCache],
        layers: range | None = None,
        wanted: Wanted = None,
    ) -> tuple[Array, Array]:
        """Implement `Decoder`, with stops before the layers whose input is kept."""
        layers = range(len(self.layers)) if layers is None else layers
        stops = sorted(set(self.taps.layers) & set(layers[1:]))
        for start, stop in pairwise((layers.start, *stops, layers.stop)):
            if delta is not None:
                self._keep_before(start, x, delta)
            last = wanted if stop == layers.stop else None
            x, delta = super().walk(x, delta, views, caches, range(start, stop), last)
        assert delta is not None, "a walk has layers"
        return x, delta

    def _keep_before(self, layer: int, x: Array, delta: Array) -> None:
        ops = self.ops
        for place, tapped in enumerate(self.taps.layers):
            if tapped == layer:
                ops.place_columns(self.kept, ops.take_rows(x, delta, None), place * x.shape[1])

    def last(self, x: Array, delta: Array, batch: Batch, wanted: Wanted) -> Array:
        """Implement `Decoder`; the norms of all rows are kept, or those of the rows that want logits."""
        ops, h = self.ops, super().last(x, delta, batch, wanted)
        if not self.taps.layers:
            kept = self.final_norm(ops, ops.take_rows(x, delta, None)) if self.taps.every else h
            ops.place_columns(self.kept, kept, 0)
        return h


def picked(kept: Array, places: list[int]) -> Array:
    """Rows of `kept`, copied."""
    rows: Array = kept[places]
    return rows


def tapped(decoder: Decoder, taps: Taps, kept: Array) -> TappedDecoder:
    """`decoder` with `taps` into `kept`. Where all rows are kept, all are computed to the end."""
    parts = {f.name: getattr(decoder, f.name) for f in fields(decoder)}
    made = TappedDecoder(**parts, taps=taps, kept=kept)
    return replace(made, narrows=False) if taps.every else made
