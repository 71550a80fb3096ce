"""Layers whose stream is several, side by side, of which attention and MLP read one mixture each and add to all.

Hyper-connections: Zhu et al. 2024, "Hyper-connections"; with gates that are sigmoids, as of Hy4 (Tencent 2026). With
streams that are mixed: Xie et al. 2026, "mHC: manifold-constrained hyper-connections", as of DeepSeek V4.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.altup import Mixture
from quire.model.net.decoder import Layer, Wanted, chosen
from quire.model.net.moe import MoeMlp
from quire.model.net.parts import Linear, Norm, RmsNorm
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache


@dataclass(frozen=True)
class Connection:
    """What a sublayer reads of n streams, and what it adds to them.

    `gates`: rows of all streams, normed, [T, n * hidden] -> [T, p], half of what sigmoids are of: those are
    (1 + tanh) / 2, which the mixtures have in their weights. `read`: n streams to one; `write`: one to n.
    """

    norm: RmsNorm
    gates: Linear
    read: Mixture
    write: Mixture | None = None

    def opened(self, ops: Ops, x: Array) -> Array:
        """x [T, n * hidden] -> what mixtures depend on, [T, p]."""
        found: Array = ops.softcap(self.gates(ops, self.norm(ops, x)), 1.0)
        return found

    def kept(self, ops: Ops, x: Array, opened: Array) -> Array:
        """x [T, n * hidden] -> the streams to which what a sublayer makes is added: themselves."""
        return x

    def spread(self, ops: Ops, y: Array, opened: Array) -> Array:
        """y [T, hidden] -> what it adds to each stream, [T, n * hidden]."""
        assert self.write is not None, "of a sublayer"
        return self.write(ops, y, opened)


@dataclass(frozen=True)
class MixedStreams:
    """How streams are mixed: `mix` n streams to n, by a matrix brought to sums of 1 in so many `rounds`; gates of
    reading are `least` + sigmoids, those of writing `most` sigmoids."""

    mix: Mixture
    rounds: int
    most: float
    least: float


@dataclass(frozen=True)
class MixingConnection(Connection):
    """Work like `Connection`, where streams are mixed by `mixed` before a sublayer adds to them; `gates` are logits."""

    mixed: MixedStreams | None = None

    def opened(self, ops: Ops, x: Array) -> Array:
        """x [T, n * hidden] -> gates of reading and writing, and the matrix that mixes, [T, (2 + n) n]."""
        mixed = self.mixed
        assert mixed is not None, "of a sublayer"
        logits = self.gates(ops, self.norm(ops, x))
        found: Array = ops.sinkhorn_gates(logits, mixed.mix.out, mixed.rounds, mixed.most, mixed.least)
        return found

    def kept(self, ops: Ops, x: Array, opened: Array) -> Array:
        """x [T, n * hidden] -> the streams, mixed."""
        assert self.mixed is not None, "of a sublayer"
        return self.mixed.mix(ops, x, opened)


@dataclass(frozen=True)
class ConnectedBlock:
    """A `Block` of several streams. `norm`: of what attention reads."""

    attention: Connection
    mlp: Connection
    norm: Norm

    def __call__(
        self, ops: Ops, layer: Layer, x: Array, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted
    ) -> tuple[Array, Array]:
        """x, h [T, n * hidden], h the streams themselves -> streams, and what is added to them, [R, n * hidden]."""
        opened = self.attention.opened(ops, x)
        read = self.norm(ops, self.attention.read(ops, x, opened))
        attended = layer.attention(ops, layer, read, batch, cache, wanted)
        x, opened = chosen(ops, x, wanted), chosen(ops, opened, wanted)
        x = ops.add(self.attention.kept(ops, x, opened), self.attention.spread(ops, attended, opened))
        opened = self.mlp.opened(ops, x)
        made = self.behind(ops, layer, layer.mlp_norm(ops, self.mlp.read(ops, x, opened)), batch)
        return self.mlp.kept(ops, x, opened), self.mlp.spread(ops, made, opened)

    def behind(self, ops: Ops, layer: Layer, h: Array, batch: Batch) -> Array:
        """Rows h that the MLP reads -> what it makes of them, [R, hidden]."""
        return layer.mlp(ops, h)


@dataclass(frozen=True)
class TokenRoutedBlock(ConnectedBlock):
    """Work like `ConnectedBlock`, with experts that the token of a row says, for all rows of a step."""

    def __call__(
        self, ops: Ops, layer: Layer, x: Array, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted
    ) -> tuple[Array, Array]:
        """Implement `Block`."""
        x, delta = super().__call__(ops, layer, x, h, batch, cache, None)
        return chosen(ops, x, wanted), chosen(ops, delta, wanted)

    def behind(self, ops: Ops, layer: Layer, h: Array, batch: Batch) -> Array:
        """h [T, hidden] -> [T, hidden]."""
        assert isinstance(layer.mlp, MoeMlp), "has experts"
        return layer.mlp.by_token(ops, h, batch.tokens)


@dataclass(frozen=True)
class RepeatedTokens:
    """The embedded tokens as each of several streams."""

    streams: int

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """x [T, hidden] -> [T, n * hidden]."""
        joined: Array = ops.join_columns((x,) * self.streams)
        return joined


@dataclass(frozen=True)
class ReadStreams(Norm):
    """The norm of the mixture that the head reads."""

    connection: Connection
    norm: Norm

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [R, n * hidden] -> [R, hidden]."""
        return self.norm(ops, self.connection.read(ops, x, self.connection.opened(ops, x)))


@dataclass(frozen=True)
class MeanStreams(Norm):
    """The norm of the mean of the streams, which the head reads."""

    streams: int
    norm: Norm

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [R, n * hidden] -> [R, hidden]."""
        hidden = x.shape[1] // self.streams
        total = ops.take_columns(x, 0, hidden)
        for i in range(1, self.streams):
            total = ops.add(total, ops.take_columns(x, i * hidden, hidden))
        return self.norm(ops, ops.scale(total, 1.0 / self.streams))
