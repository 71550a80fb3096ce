"""Experts whose output passes the next layer by, and is added behind its MLP (ScMoE, Cai et al. 2024; LongCat-Flash,
Meituan 2025): attention between them need not wait for it.

From one layer to the next it lies beside what is added to the stream at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.decoder import Layer, Wanted, chosen, sequential_block
from quire.model.net.parts import Norm
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache


@dataclass(frozen=True)
class PassedNorm:
    """The norm before a layer that experts pass by."""

    norm: Norm

    def __call__(self, ops: Ops, x: Array) -> Array:
        """The norm of x."""
        return self.norm(ops, x)

    def add(self, ops: Ops, x: Array, delta: Array) -> tuple[Array, Array]:
        """(x + the MLP's columns of delta, its norm beside those of the experts); both are given up."""
        width = x.shape[1]
        if delta.shape[1] == width:  # a layer that is tried by itself
            return self.norm.add(ops, x, delta)
        x, h = self.norm.add(ops, x, ops.take_columns(delta, 0, width))
        return x, ops.place_columns(delta, h, 0)


def passing_block(
    ops: Ops, layer: Layer, x: Array, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted
) -> tuple[Array, Array]:
    """Work like `sequential_block`; what lies beside the norm in h is added to what the MLP makes."""
    width = x.shape[1]
    if h.shape[1] == width:
        return sequential_block(ops, layer, x, h, batch, cache, wanted)
    passed = chosen(ops, ops.take_columns(h, width, width), wanted)
    x, delta = sequential_block(ops, layer, x, ops.take_columns(h, 0, width), batch, cache, wanted)
    return x, ops.add(delta, passed)
