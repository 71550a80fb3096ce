"""A selective scan (Mamba-2: Dao and Gu 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.decoder import Layer, Wanted, chosen
from quire.model.net.parts import Product
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.convolution import Convolution
from quire.ops.layout import LayerCache, StatefulCache
from quire.ops.recurrent import ScanSpec


@dataclass(frozen=True)
class Scan:
    """What follows the `qkv` of a layer, which makes x, B and C of rows.

    `gate` [inner, hidden] gates the result, `steps` [heads, hidden] makes what time steps are made of. Each run of
    `span` channels is normed by `scale` f32 [inner], behind the gate if `gate_first`; None: there is no norm.
    """

    conv: Convolution
    scan: ScanSpec
    gate: Product
    steps: Product
    scale: Array | None
    span: int
    gate_first: bool
    eps: float

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]; rows are written to `cache`, states to its states."""
        assert isinstance(cache, StatefulCache) and batch.states is not None, "caches and steps have states"
        rows, paged = layer.qkv(ops, h), (batch.cu_q, batch.context, batch.block_tables)
        mixed = ops.causal_conv(rows, cache[0], batch.slots, paged, self.conv, batch.tree)
        _, found = ops.ssm_scan(mixed, None, self.steps(ops, h), cache.states, batch.states, self.scan)
        gate = self.gate(ops, h)
        found = ops.gated_rmsnorm(found, gate, self.scale, self.span, "silu", self.gate_first, self.eps)
        return layer.o(ops, chosen(ops, found, wanted))
