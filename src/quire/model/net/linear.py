"""The one linear layer."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.net.lora import Change
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.weights import Packed


@dataclass(frozen=True)
class Linear:
    """y = x W^T + bias, W packed in any format, and what the rows' adapters add (none where there is no room).

    `more`: the rows of W below these, where they are in another format (GGUF files often keep v in more bits than q).
    """

    weight: Packed
    bias: Array | None = None
    adapters: tuple[Change, ...] = ()
    more: tuple[Linear, ...] = ()

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, k] f32 -> [T, n] f32."""
        y: Array = ops.linear(x, self.weight, self.bias)
        for change in self.adapters:
            y = change(ops, x, y)
        if self.more:
            y = ops.join_columns((y, *(part(ops, x) for part in self.more)))
        return y
