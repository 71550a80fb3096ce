"""Attention whose result is gated, number by number, by what a matrix makes of the row (Qiu et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.decoder import Layer, Wanted, chosen, own_rows
from quire.model.net.parts import Linear
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache


@dataclass(frozen=True)
class GatedAttention:
    """Work like `own_attention`, with sigmoid(gate(h)) times what attention gives before the last matrix."""

    gate: Linear

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]; keys and values of all rows are written to `cache`."""
        gate, qkv = self.gate(ops, h), own_rows(ops, layer, h, batch, cache)
        found = ops.attention(qkv, cache[0], batch.cu_q, batch.context, batch.block_tables, layer.attend, batch.tree)
        found = ops.gated_rmsnorm(found, gate, None, gate.shape[1], "sigmoid", False, layer.eps)
        return layer.o(ops, chosen(ops, found, wanted))
