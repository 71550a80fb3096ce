"""Norms inside of attention and of an MLP: of what their last matrices read (Wang et al. 2023, Ma et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.core.dtypes import F32
from quire.model.net.decoder import Layer
from quire.model.net.parts import GatedMlp, Product
from quire.ops.arrays import Array, cast_to
from quire.ops.backend import Ops
from quire.parallel.comm import Comm


@dataclass(frozen=True)
class InnerNorm:
    """The rmsnorm of whole rows."""

    weight: Array
    eps: float

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, d] -> [T, d]."""
        return ops.rmsnorm(x, self.weight, self.eps)


@dataclass(frozen=True)
class TensorParallelInnerNorm:
    """`InnerNorm` of rows whose columns lie on several ranks, `widths[rank]` on each; `weight` is of all."""

    weight: Array
    eps: float
    widths: tuple[int, ...]
    comm: Comm

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, own width] -> [T, own width]."""
        own, before = self.widths[self.comm.rank], sum(self.widths[: self.comm.rank])
        rows = ops.rmsnorm(self.comm.gather_columns(ops, x, self.widths), self.weight, self.eps)
        return ops.take_columns(rows, before, own)


@dataclass(frozen=True)
class NormedProduct:
    """What `own` makes of normed rows."""

    norm: Callable[[Ops, Array], Array]
    own: Product

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, k] f32 -> [T, n] f32."""
        return self.own(ops, self.norm(ops, x))


def over_ranks(layer: Layer, ops: Ops, widths: Callable[[str], tuple[int, ...]], comm: Comm) -> Layer:
    """`layer` whose norms of this kind are of the columns of all ranks; `widths(role)`: inputs of a matrix by rank."""

    def joined(product: Product, role: str) -> Product:
        if not isinstance(product, NormedProduct) or not isinstance(product.norm, InnerNorm):
            return product
        norm, all_widths = product.norm, widths(role)
        ops.begin_step()
        weight = cast_to(comm.gather_columns(ops, norm.weight[None], all_widths)[0], F32, copy=True)
        return replace(product, norm=TensorParallelInnerNorm(weight, norm.eps, all_widths, comm))

    mlp = layer.mlp
    if isinstance(mlp, GatedMlp):
        mlp = replace(mlp, down=joined(mlp.down, "down"))
    return replace(layer, o=joined(layer.o, "o"), mlp=mlp)
