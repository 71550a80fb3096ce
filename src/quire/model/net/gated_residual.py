"""Layers of several streams, of which attention and MLP read a mean by gates of each number (Qwen4-Exp)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.altup import Mixture
from quire.model.net.decoder import Layer, Wanted, chosen
from quire.model.net.gated_ngrams import GatedNgrams
from quire.model.net.parts import Linear
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache


@dataclass(frozen=True)
class StreamNorm:
    """Norm of each of several streams. `weight` f32: of all of them."""

    weight: Array
    hidden: int
    eps: float

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, n * hidden] -> the same of new rows."""
        rows = ops.take_columns(x, 0, x.shape[1])
        normed: Array = ops.norm_spans(rows, self.weight, 0, self.hidden, False, self.eps)
        return normed


@dataclass(frozen=True)
class StreamGates:
    """The mean of n streams, normed, each number by a gate: sigmoid(up(silu(down(x) / n)))."""

    norm: StreamNorm
    down: Linear
    up: Linear
    mean: Mixture

    def read(self, ops: Ops, normed: Array) -> Array:
        """Normed streams [T, n * hidden], given up -> [T, hidden]."""
        streams = normed.shape[1] // self.norm.hidden
        inner = ops.activation(ops.scale(self.down(ops, normed), 1 / streams), "silu")
        gated = ops.gated_rmsnorm(normed, self.up(ops, inner), None, normed.shape[1], "sigmoid", False, 0.0)
        return self.mean(ops, gated, inner)


@dataclass(frozen=True)
class Residual:
    """What a sublayer reads of n streams, and how much it adds to each.

    `inject`: of normed streams, half of what sigmoids are of: 1 + tanh is twice such a sigmoid, which `write` has in
    its bias.
    """

    gates: StreamGates
    inject: Linear
    write: Mixture

    def read(self, ops: Ops, x: Array) -> tuple[Array, Array]:
        """x [T, n * hidden] -> what is read [T, hidden], and what is added depends on [T, n]."""
        normed = self.gates.norm(ops, x)
        opened = ops.softcap(self.inject(ops, normed), 1.0)
        return self.gates.read(ops, normed), opened

    def spread(self, ops: Ops, y: Array, opened: Array) -> Array:
        """y [T, hidden] -> what it adds to each stream, [T, n * hidden]."""
        return self.write(ops, y, opened)


@dataclass(frozen=True)
class ResidualBlock:
    """A `Block` of several streams. `ngrams`: what is added before attention."""

    attention: Residual
    mlp: Residual
    ngrams: GatedNgrams | None = None

    def __call__(
        self, ops: Ops, layer: Layer, x: Array, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted
    ) -> tuple[Array, Array]:
        """x, h [T, n * hidden], h the streams themselves -> streams, and what is added to them, [R, n * hidden]."""
        if self.ngrams is not None:
            x = self.ngrams(ops, x, batch, cache)
        read, opened = self.attention.read(ops, x)
        attended = layer.attention(ops, layer, read, batch, cache, wanted)
        x, opened = chosen(ops, x, wanted), chosen(ops, opened, wanted)
        x = ops.add(x, self.attention.spread(ops, attended, opened))
        read, opened = self.mlp.read(ops, x)
        return x, self.mlp.spread(ops, layer.mlp(ops, read), opened)


@dataclass(frozen=True)
class ReadResidual:
    """What the head reads of the streams."""

    gates: StreamGates

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [R, n * hidden] -> [R, hidden]."""
        return self.gates.read(ops, self.gates.norm(ops, x))

    def add(self, ops: Ops, x: Array, delta: Array) -> tuple[Array, Array]:
        """(x + delta, what is read of it); x is given up."""
        x = ops.add(x, delta)
        return x, self(ops, x)
