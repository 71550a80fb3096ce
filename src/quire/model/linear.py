"""The one linear layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.ops.backend import Ops
from quire.ops.weights import Packed


@dataclass(frozen=True)
class Linear:
    """y = x W^T + bias, W packed in any format. Adapters (LoRA) will be one more field, added after the bias."""

    weight: Packed
    bias: Tensor | None = None

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """x [T, k] f32 -> [T, n] f32."""
        return ops.linear(x, self.weight, self.bias)  # type: ignore[no-any-return]
