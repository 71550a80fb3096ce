"""A selective scan of single channels (Mamba: Gu and Dao 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.convolved import convolved, states_of
from quire.model.net.decoder import Layer, Wanted, chosen
from quire.model.net.parts import Linear, Norm
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.convolution import Convolution
from quire.ops.layout import LayerCache
from quire.ops.recurrent import ScanSpec


@dataclass(frozen=True)
class ChannelScanRule:
    """What follows the `qkv` of a layer, which makes channels of rows.

    `gate` [inner, hidden] gates the result. Of channels behind the convolution `pairs` [2 * state, inner] makes B and
    C, `low` [rank, inner] and, behind `norm`, `steps` [inner, rank] with its bias time steps. B and C are normed by
    `scales` f32 [2 * state] with `eps`, where there are any (Jamba, Falcon Mamba).
    """

    conv: Convolution
    scan: ScanSpec
    gate: Linear
    low: Linear
    norm: Norm
    pairs: Linear
    scales: Array | None
    eps: float
    steps: Linear

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]; rows are written to `cache`, states to its states."""
        x = convolved(ops, layer, h, batch, cache, self.conv)
        steps = self.steps(ops, self.norm(ops, self.low(ops, x)))
        pairs = self.pairs(ops, x)
        if self.scales is not None:
            pairs = ops.norm_spans(pairs, self.scales, 0, self.scan.state, False, self.eps)
        _, found = ops.ssm_scan(x, pairs, steps, *states_of(batch, cache), self.scan)
        gate = self.gate(ops, h)
        found = ops.gated_rmsnorm(found, gate, None, gate.shape[1], "silu", True, self.eps)
        return layer.o(ops, chosen(ops, found, wanted))
