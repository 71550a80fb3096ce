"""Lightning attention (Qin et al. 2024): a scan whose steps are all 1, over activated values, keys and queries."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.convolved import states_of
from quire.model.net.decoder import Layer, Wanted, chosen
from quire.model.net.parts import Product
from quire.model.net.scan import Gating
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache
from quire.ops.recurrent import ScanSpec


@dataclass(frozen=True)
class LightningAttention:
    """What follows the `qkv` of a layer, which makes values, keys and queries of rows, that `activation` is of.

    `gate` [heads * head_dim, hidden] makes what gates the result, which `norm` applies.
    """

    scan: ScanSpec
    activation: str
    gate: Product
    norm: Gating

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]; states are written to those of `cache`."""
        mixed = ops.activation(layer.qkv(ops, h), self.activation)
        _, found = ops.ssm_scan(mixed, None, None, *states_of(batch, cache), self.scan)
        return layer.o(ops, chosen(ops, self.norm(ops, found, self.gate(ops, h)), wanted))
