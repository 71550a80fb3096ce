"""Values that are shorter than keys: a cache has room for as many numbers of both, which values fill with their first.

So a scale of a value's codes is that of its own numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.parts import Product
from quire.ops.arrays import Array
from quire.ops.backend import Ops


@dataclass(frozen=True)
class LengthenedValues:
    """Queries and keys, `start` columns, and behind them values whose heads are made as long as those of keys."""

    start: int
    short: int
    long: int

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """x [T, start + kv_heads * short] -> [T, start + kv_heads * long], a new tensor; long <= 2 * short."""
        rows, width = x.shape
        before, values = ops.take_columns(x, 0, self.start), ops.take_columns(x, self.start, width - self.start)
        heads = values.reshape(-1, self.short)
        longer = ops.join_columns((heads, ops.take_columns(heads, 0, self.long - self.short)))
        joined: Array = ops.join_columns((before, longer.reshape(rows, -1)))
        return joined


@dataclass(frozen=True)
class ShortenedHeads:
    """What `own` makes of the first `short` numbers of each head, of `long` in all."""

    own: Product
    short: int
    long: int

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, heads * long] -> [T, n]."""
        heads = ops.take_columns(x.reshape(-1, self.long), 0, self.short)
        return self.own(ops, heads.reshape(x.shape[0], -1))
