"""LoRA adapters (Hu et al. 2021): y += B_i (A_i x) * scale for the rows of adapter i, many adapters in one batch.

Every linear of a layer has room for `max_loras` adapters, ranks padded with zeros; a row names its adapter by a number
in an array that the step fills, so that recorded steps serve any mixture. Each row is computed from itself alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.ops.backend import Ops

NONE = -1
"""What a row without an adapter has in the place of a slot."""


@dataclass(frozen=True)
class Piece:
    """Room for the adapters of one role: columns `start` .. `start` + n of its linear's output.

    a [slots, rank, k] f32; b [slots, rank, n] f32, the scale multiplied in; rows [tokens] int32: a row's slot, or -1.
    """

    a: Tensor
    b: Tensor
    rows: Tensor
    start: int

    def add(self, ops: Ops, x: Tensor, y: Tensor) -> Tensor:
        """y[:, start:start + n] += b (a x) in place, each row with its own adapter; x [T, k], y [T, width] f32."""
        return ops.lora(x, y, self.a, self.b, self.rows, self.start)  # type: ignore[no-any-return]
