"""Norms with more behind them: a further layer of the rows that want logits, gates of rows by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.net.parts import Linear, Norm, Product
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


@dataclass(frozen=True)
class SelfGatedNorm:
    """norm(x) * sigmoid(up(silu(down(norm(x))))): a gate that the normed row makes of itself (A.X-K2)."""

    norm: Norm
    down: Product
    up: Product

    def __call__(self, ops: Ops, x: Array) -> Array:
        """The gated norm of x."""
        return self._gated(ops, self.norm(ops, x))

    def add(self, ops: Ops, x: Array, delta: Array) -> tuple[Array, Array]:
        """(x + delta, its gated norm); x is given up."""
        x, h = self.norm.add(ops, x, delta)
        return x, self._gated(ops, h)

    def _gated(self, ops: Ops, h: Array) -> Array:
        gate = self.up(ops, ops.activation(self.down(ops, h), "silu"))
        gated: Array = ops.gated_rmsnorm(h, gate, None, h.shape[1], "sigmoid", False, 0.0)
        return gated
