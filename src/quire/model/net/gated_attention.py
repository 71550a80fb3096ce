"""Attention whose result is gated by what a matrix makes of the row (Qiu et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.model.batch import Batch
from quire.model.net.decoder import Layer, Wanted, attended_heads, chosen, own_rows
from quire.model.net.parts import Product
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache


class OutputGate(Protocol):
    """A matrix, and how what it makes of a row gates what attention gives for the row."""

    @property
    def matrix(self) -> Product:
        """h [T, hidden] -> the gates [T, n]."""
        ...

    def __call__(self, ops: Ops, found: Array, gate: Array) -> Array:
        """found [T, heads * head_dim], gated, in place."""
        ...


@dataclass(frozen=True)
class NumberGate:
    """A sigmoid for each number."""

    matrix: Product

    def __call__(self, ops: Ops, found: Array, gate: Array) -> Array:
        """Implement `OutputGate`; gate [T, heads * head_dim]."""
        gated: Array = ops.gated_rmsnorm(found, gate, None, gate.shape[1], "sigmoid", False, 0.0)
        return gated


@dataclass(frozen=True)
class HeadGate:
    """A sigmoid for each head."""

    matrix: Product

    def __call__(self, ops: Ops, found: Array, gate: Array) -> Array:
        """Implement `OutputGate`; gate [T, heads]."""
        heads = gate.shape[1]
        each: Array = ops.scale_by_sigmoid(found.reshape(-1, found.shape[1] // heads), gate.reshape(-1, 1))
        return each.reshape(found.shape)


@dataclass(frozen=True)
class SoftplusGate:
    """A softplus for each head, or for each number."""

    matrix: Product

    def __call__(self, ops: Ops, found: Array, gate: Array) -> Array:
        """Implement `OutputGate`; gate [T, heads] or [T, heads * head_dim]."""
        gated: Array = ops.scale_by_softplus(found, gate)
        return gated


@dataclass(frozen=True)
class GatedAttention:
    """Work like `own_attention`, with a gate on what attention gives before the last matrix."""

    gate: OutputGate

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]; keys and values of all rows are written to `cache`."""
        gate, qkv = self.gate.matrix(ops, h), own_rows(ops, layer, h, batch, cache)
        found = self.gate(ops, attended_heads(ops, layer, qkv, batch, cache), gate)
        return layer.o(ops, chosen(ops, found, wanted))
