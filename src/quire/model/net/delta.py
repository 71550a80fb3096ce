"""The gated delta rule (Yang et al. 2024), and Kimi's, which has a decay for each channel (Kimi Team 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.convolved import convolved, states_of
from quire.model.net.decoder import Layer, Wanted, chosen
from quire.model.net.parts import Linear, LowRank
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.convolution import Convolution
from quire.ops.layout import LayerCache
from quire.ops.recurrent import DeltaSpec


@dataclass(frozen=True)
class GatedDeltaRule:
    """What follows the `qkv` of a layer, which makes queries, keys and values of rows.

    `z` makes what gates the result, [T, values], by the function `gate`; its heads are normed by `scale` f32
    [value_dim] before. `gates` makes what beta and decays are made of; `decays`: what those of channels are, None where
    heads have one each.
    """

    conv: Convolution
    rule: DeltaSpec
    z: Linear | LowRank
    gates: Linear
    scale: Array
    eps: float
    decays: Linear | LowRank | None = None
    gate: str = "silu"

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]; rows are written to `cache`, states to its states."""
        mixed = convolved(ops, layer, h, batch, cache, self.conv)
        decays = None if self.decays is None else self.decays(ops, h)
        _, found = ops.delta_rule(mixed, self.gates(ops, h), decays, *states_of(batch, cache), self.rule)
        gate = self.z(ops, h)
        found = ops.gated_rmsnorm(found, gate, self.scale, self.rule.value_dim, self.gate, False, self.eps)
        return layer.o(ops, chosen(ops, found, wanted))
