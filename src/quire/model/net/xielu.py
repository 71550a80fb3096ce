"""An MLP without a gate whose activation has learned numbers (xIELU, Huang and Schlag 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.net.parts import Linear
from quire.ops.arrays import Array
from quire.ops.backend import Ops


@dataclass(frozen=True)
class XieluMlp:
    """down(xielu(up)); `positive`, `negative` and `beta` as of the op."""

    up: Linear
    down: Linear
    positive: float
    negative: float
    beta: float

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(ops, ops.xielu(self.up(ops, x), self.positive, self.negative, self.beta))
