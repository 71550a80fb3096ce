"""Layers whose stream is several, side by side, of which one runs through attention and MLP (Gemma 3n).

AltUp: Baykal et al. 2023, "Alternating updates for efficient transformers". Laurel: Menghani et al. 2024, "LAuReL:
learned augmented residual layer". Gates that few numbers pass: Gemma Team 2025.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt

from quire.model.batch import Batch
from quire.model.net.decoder import Inputs, Layer, Wanted, chosen
from quire.model.net.parts import GatedMlp, Mlp, Norm, Product
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache
from quire.parallel.comm import Comm

LEAST = 1e-5
"""The mean square that a stream has at least, where it is scaled to the length of another."""


@dataclass(frozen=True)
class Mixture:
    """Streams made of streams: `weight` [out * n, p] f32 and `bias` [out * n] f32, as of `ops.mix_streams`."""

    weight: Array
    bias: Array
    out: int

    def __call__(self, ops: Ops, x: Array, m: Array) -> Array:
        """x [T, n * hidden], m [T, p] -> [T, out * hidden]."""
        mixed: Array = ops.mix_streams(x, m, self.weight, self.bias, self.out)
        return mixed


@dataclass(frozen=True)
class AltUp:
    """What mixes the streams before a layer (`predict`) and behind it (`correct`, which reads the new one last).

    `router`: of rows of the running stream, [T, hidden] -> [T, n]. `spread`: one row for all streams but the first.
    `scale` [hidden] f32: of the running stream where inputs are made of it.
    """

    hidden: int
    norm: Norm
    router: Product
    predict: Mixture
    correct: Mixture
    spread: Mixture
    scale: Array

    def first(self, ops: Ops, x: Array) -> Array:
        """x [T, n * hidden] -> its first stream, copied."""
        found: Array = ops.take_columns(x, 0, self.hidden)
        return found

    def routed(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> what mixtures depend on, [T, n]."""
        found: Array = ops.softcap(self.router(ops, self.norm(ops, x)), 1.0)
        return found


@dataclass(frozen=True)
class Laurel:
    """x + norm(right(left(x)))."""

    left: Product
    right: Product
    norm: Norm

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, hidden]."""
        added: Array = ops.add(self.norm(ops, self.right(ops, self.left(ops, x))), x)
        return added


@dataclass(frozen=True)
class SparseGate:
    """What `own` makes of rows, gates and as many others, with the gates cut (`ops.sparse_gate`)."""

    own: Product
    factor: float

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, k] -> [T, 2 f]."""
        return ops.sparse_gate(self.own(ops, x), self.factor)


@dataclass(frozen=True)
class TensorParallelGate:
    """`SparseGate` of gates that lie on several ranks, `widths[rank]` on each."""

    own: Product
    factor: float
    widths: tuple[int, ...]
    comm: Comm

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, k] -> [T, 2 * own width]."""
        y, (own, before) = self.own(ops, x), (self.widths[self.comm.rank], sum(self.widths[: self.comm.rank]))
        gates = self.comm.gather_columns(ops, ops.take_columns(y, 0, own), self.widths)
        cut = ops.sparse_gate(ops.join_columns((gates, gates)), self.factor)
        placed: Array = ops.place_columns(y, ops.take_columns(cut, before, own), 0)
        return placed


def gates_over_ranks(mlp: Mlp, widths: Callable[[str], tuple[int, ...]], comm: Comm) -> Mlp:
    """`mlp` whose gates are cut by those of all ranks, of which `widths` of "down" says how many each has; as it is
    without such gates."""
    if not isinstance(mlp, GatedMlp) or not isinstance(mlp.gate_up, SparseGate):
        return mlp
    return replace(mlp, gate_up=TensorParallelGate(mlp.gate_up.own, mlp.gate_up.factor, widths("down"), comm))


@dataclass(frozen=True)
class StreamInputs:
    """project(act(gate(x)) * given), normed: what all streams but the first are given behind a layer.

    `layer`: which of the batch's inputs are given.
    """

    layer: int
    gate: Product
    project: Product
    norm: Norm
    activation: str

    def __call__(self, ops: Ops, x: Array, batch: Batch, wanted: Wanted) -> Array:
        """x [R, hidden] -> [R, hidden]."""
        assert batch.inputs is not None, "decoders of such layers make inputs"
        gate = self.gate(ops, x)
        width = gate.shape[1]
        given = chosen(ops, ops.take_columns(batch.inputs, self.layer * width, width), wanted)
        inner = ops.gated_activation(ops.join_columns((gate, given)), self.activation)
        return self.norm(ops, self.project(ops, inner))


@dataclass(frozen=True)
class StreamsBlock:
    """A `Block` of several streams, of which the first runs through attention and MLP. `norm`: before attention."""

    altup: AltUp
    norm: Norm
    laurel: Laurel
    inputs: StreamInputs

    def __call__(
        self, ops: Ops, layer: Layer, x: Array, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted
    ) -> tuple[Array, Array]:
        """x, h [T, n * hidden], h the streams themselves -> streams, and what is added to them, [R, n * hidden]."""
        up = self.altup
        predicted = up.predict(ops, x, up.routed(ops, up.first(ops, x)))
        active = up.first(ops, predicted)
        normed = self.norm(ops, active)
        beside = self.laurel(ops, normed)
        attended = layer.attn_post_norm(ops, layer.attention(ops, layer, normed, batch, cache, wanted))
        predicted, active, beside = (chosen(ops, one, wanted) for one in (predicted, active, beside))
        y = ops.scale(ops.add(ops.add(active, attended), beside), sqrt(0.5))
        y = ops.add(y, layer.mlp_post_norm(ops, layer.mlp(ops, layer.mlp_norm(ops, y))))
        routed = up.routed(ops, y)
        streams = up.correct(ops, ops.join_columns((predicted, y)), routed)
        first = ops.scale_columns(up.first(ops, streams), up.scale)
        return streams, up.spread(ops, self.inputs(ops, first, batch, wanted), routed)


@dataclass(frozen=True)
class StreamsOfTokens:
    """The embedded tokens as the first of several streams, and what `projects` make of them, of the same length."""

    projects: tuple[Product, ...]
    streams: int

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """x [T, hidden] -> [T, n * hidden]."""
        joined = ops.join_columns((x, *(project(ops, x) for project in self.projects)))
        found: Array = ops.match_lengths(joined, self.streams, LEAST)
        return found


@dataclass(frozen=True)
class InputsOfStream:
    """`own` of the first of several streams: the embedded tokens themselves."""

    own: Inputs
    hidden: int

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """x [T, n * hidden] -> [T, layers * width]."""
        return self.own(ops, ops.take_columns(x, 0, self.hidden), batch)


@dataclass(frozen=True)
class JoinedStreams(Norm):
    """The norm of the mean of the streams, each but the first projected and brought to the length of that."""

    projects: tuple[Product, ...]
    norm: Norm

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [R, n * hidden] -> [R, hidden]."""
        count = 1 + len(self.projects)
        hidden = x.shape[1] // count
        parts = [ops.take_columns(x, i * hidden, hidden) for i in range(count)]
        made = [parts[0], *(project(ops, part) for project, part in zip(self.projects, parts[1:], strict=True))]
        matched = ops.match_lengths(ops.join_columns(tuple(made)), count, LEAST)
        total = ops.take_columns(matched, 0, hidden)
        for i in range(1, count):
            total = ops.add(total, ops.take_columns(matched, i * hidden, hidden))
        return self.norm(ops, ops.scale(total, 1.0 / count))
