"""The gated delta rule (Yang et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.decoder import Layer, Wanted, chosen
from quire.model.net.parts import Linear
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.convolution import Convolution
from quire.ops.layout import LayerCache, StatefulCache
from quire.ops.recurrent import DeltaSpec


@dataclass(frozen=True)
class GatedDeltaRule:
    """What follows the `qkv` of a layer, which makes queries, keys and values of rows.

    `z` [values, hidden] gates the result, whose heads are normed by `scale` f32 [value_dim] before; `gates` makes what
    beta and decays are made of.
    """

    conv: Convolution
    rule: DeltaSpec
    z: Linear
    gates: Linear
    scale: Array
    eps: float

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]; rows are written to `cache`, states to its states."""
        assert isinstance(cache, StatefulCache) and batch.states is not None, "caches and steps have states"
        qkv, paged = layer.qkv(ops, h), (batch.cu_q, batch.context, batch.block_tables)
        mixed = ops.causal_conv(qkv, cache[0], batch.slots, paged, self.conv, batch.tree)
        _, found = ops.delta_rule(mixed, self.gates(ops, h), None, cache.states, batch.states, self.rule)
        gate = self.z(ops, h)
        found = ops.gated_rmsnorm(found, gate, self.scale, self.rule.value_dim, "silu", False, self.eps)
        return layer.o(ops, chosen(ops, found, wanted))
