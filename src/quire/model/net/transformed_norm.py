"""What some models have between their last norm and the head: a further layer of the rows that want logits."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.net.parts import Linear, Norm
from quire.ops.arrays import Array
from quire.ops.backend import Ops


@dataclass(frozen=True)
class TransformedNorm:
    """norm(act(linear(first(x)))): what stands between the stream and the head of models that began as encoders."""

    first: Norm
    linear: Linear
    activation: str
    norm: Norm

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, hidden]."""
        return self._rest(ops, self.first(ops, x))

    def add(self, ops: Ops, x: Array, delta: Array) -> tuple[Array, Array]:
        """(x + delta, what is made of it); x is given up."""
        x, h = self.first.add(ops, x, delta)
        return x, self._rest(ops, h)

    def _rest(self, ops: Ops, h: Array) -> Array:
        return self.norm(ops, ops.activation(self.linear(ops, h), self.activation))
