"""A gated short convolution over tokens (LFM2, Liquid AI 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.convolved import convolved
from quire.model.net.decoder import Layer, Wanted, chosen
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.convolution import Convolution
from quire.ops.layout import LayerCache


@dataclass(frozen=True)
class ShortConv:
    """What follows the `qkv` of a layer, which makes a row's gates and what is convolved between them."""

    conv: Convolution

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]; what is convolved of the rows is written to `cache`."""
        mixed = convolved(ops, layer, h, batch, cache, self.conv)
        return layer.o(ops, chosen(ops, mixed, wanted))
