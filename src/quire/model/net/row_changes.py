"""Changes to queries and keys that few families have: layernorms of heads, and a rotation before their norms."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.ops.arrays import Array
from quire.ops.backend import Ops


@dataclass(frozen=True)
class HeadLayerNorm:
    """Layernorm of each head of `width` columns from `start` on; all heads have one weight and bias [head_dim]
    (Dehghani et al. 2023)."""

    weight: Array
    bias: Array | None
    start: int
    width: int
    eps: float

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """Norm heads of x in place."""
        heads = ops.take_columns(x, self.start, self.width).reshape(-1, len(self.weight))
        normed = ops.layernorm(heads, self.weight, self.bias, self.eps)
        placed: Array = ops.place_columns(x, normed.reshape(len(x), self.width), self.start)
        return placed


@dataclass(frozen=True)
class Rotated:
    """Heads of the first `width` columns turned by `table`, as of `rope_and_cache`, before what follows: norms of
    turned heads (HunYuan)."""

    table: Array
    width: int
    head_dim: int

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """Turn heads of x in place."""
        heads = ops.take_columns(x, 0, self.width)
        turned = ops.rope_queries(heads, batch.positions, self.table, 0, self.head_dim, None, 1.0)
        placed: Array = ops.place_columns(x, turned, 0)
        return placed
