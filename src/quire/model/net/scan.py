"""A selective scan (Mamba-2: Dao and Gu 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.convolved import convolved, states_of
from quire.model.net.decoder import Layer, Wanted, chosen
from quire.model.net.parts import Product
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.convolution import Convolution
from quire.ops.layout import LayerCache
from quire.ops.recurrent import ScanSpec


@dataclass(frozen=True)
class GatedNorm:
    """The gate of a scan's result, "silu" or "sigmoid" as `kind` says, and a norm of each run of `span` channels by
    `scale` f32 [inner], behind the gate if `gate_first`; None: the gate alone."""

    scale: Array | None
    span: int
    gate_first: bool
    eps: float
    kind: str = "silu"

    def __call__(self, ops: Ops, x: Array, gate: Array) -> Array:
        """x [T, inner], which is given up, and its gate [T, inner] -> [T, inner]."""
        return ops.gated_rmsnorm(x, gate, self.scale, self.span, self.kind, self.gate_first, self.eps)


Gating = Callable[[Ops, Array, Array], Array]
"""What a `GatedNorm` does."""


@dataclass(frozen=True)
class Scan:
    """What follows the `qkv` of a layer, which makes x, B and C of rows.

    `gate` [inner, hidden] makes the result's gate, which `norm` applies, `steps` [heads, hidden] what time steps are
    made of.
    """

    conv: Convolution
    scan: ScanSpec
    gate: Product
    steps: Product
    norm: Gating

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]; rows are written to `cache`, states to its states."""
        mixed = convolved(ops, layer, h, batch, cache, self.conv)
        _, found = ops.ssm_scan(mixed, None, self.steps(ops, h), *states_of(batch, cache), self.scan)
        return layer.o(ops, chosen(ops, self.norm(ops, found, self.gate(ops, h)), wanted))
