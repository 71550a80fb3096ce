"""The pieces a layer is put together from at build time: linear layers, norms, MLPs, steps of some families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.model.batch import Batch
from quire.model.net.lora import Change
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.experts import Clamp
from quire.ops.weights import Packed, PackedTable, PieceTable, StoredTable


@dataclass(frozen=True)
class Linear:
    """y = x W^T + bias, W packed in any format, and what the rows' adapters add (none where there is no room).

    `more`: further rows of W, below those of `weight`, that are packed in another format: GGUF files often keep v in
    more bits than q and k. Their columns of y follow.
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


RowChange = Callable[[Ops, Array, Batch], Array]
"""A change to rows [T, d] f32 of one step, in place or not; the result is returned."""

Mlp = Callable[[Ops, Array], Array]
"""rows [T, hidden] f32 -> [T, hidden] f32, none of which depends on another row."""

Embed = Callable[[Ops, Array], Array]
"""tokens [T] int32 -> their rows [T, width]."""
Product = Callable[[Ops, Array], Array]
"""x [T, k] f32 -> [T, n] f32: a linear, or what is made of several."""


@dataclass(frozen=True)
class LowRank:
    """up(down(h)): a matrix by way of a smaller space."""

    down: Linear
    up: Linear

    def __call__(self, ops: Ops, h: Array) -> Array:
        """h [T, hidden] -> [T, n]."""
        return self.up(ops, self.down(ops, h))


@dataclass(frozen=True)
class Scaled:
    """What `own` makes, times `factor`."""

    own: Product
    factor: float

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, k] f32 -> [T, n] f32."""
        return ops.scale(self.own(ops, x), self.factor)


def scaled(own: Product, factor: float) -> Product:
    """`own`, whose results are multiplied by `factor` where that is not 1."""
    return own if factor == 1.0 else Scaled(own, factor)


def absent(ops: Ops, x: Array) -> Array:
    """Stand for a matrix or an MLP that a layer does not have; nothing runs it."""
    raise AssertionError("a layer runs what it has")


class Norm(Protocol):
    """A norm of rows [T, d] f32. Classes that derive from it need no `add` of their own."""

    def __call__(self, ops: Ops, x: Array) -> Array:
        """The norm of x."""
        ...

    def add(self, ops: Ops, x: Array, delta: Array) -> tuple[Array, Array]:
        """(x + delta, its norm); x is given up."""
        x = ops.add(x, delta)
        return x, self(ops, x)


@dataclass(frozen=True)
class Embedding:
    """Rows of a table [V, width] by token, and what is changed in them.

    `first`: the table's first token, where it has some of them only; rows of others are -0. None: it has all.
    """

    table: Array | PackedTable | StoredTable | PieceTable
    first: int | None = None
    changes: tuple[Callable[[Ops, Array, Array], Array], ...] = ()

    def __call__(self, ops: Ops, tokens: Array) -> Array:
        """tokens [T] int32 -> [T, width]."""
        x: Array = ops.embedding(tokens, self.table, self.first)
        for change in self.changes:
            x = change(ops, x, tokens)
        return x


@dataclass(frozen=True)
class RmsNorm:
    """x / rms(x) * weight."""

    weight: Array
    eps: float

    def __call__(self, ops: Ops, x: Array) -> Array:
        """The norm of x."""
        return ops.rmsnorm(x, self.weight, self.eps)

    def add(self, ops: Ops, x: Array, delta: Array) -> tuple[Array, Array]:
        """(x + delta, its norm); x is given up."""
        return ops.add_rmsnorm(x, delta, self.weight, self.eps)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean) / deviation * weight + bias."""

    weight: Array
    bias: Array | None
    eps: float

    def __call__(self, ops: Ops, x: Array) -> Array:
        """The norm of x."""
        return ops.layernorm(x, self.weight, self.bias, self.eps)

    def add(self, ops: Ops, x: Array, delta: Array) -> tuple[Array, Array]:
        """(x + delta, its norm); x is given up."""
        return ops.add_layernorm(x, delta, self.weight, self.bias, self.eps)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class NoNorm(Norm):
    """x itself: families that norm only what a block adds (OLMo 2)."""

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x."""
        return x


@dataclass(frozen=True)
class ReplacingNorm:
    """The norm of x takes the place of x in the stream (post-LN, Vaswani et al. 2017)."""

    norm: Norm

    def __call__(self, ops: Ops, x: Array) -> Array:
        """The norm of x, which stays as it is: nothing reads it any more."""
        return self.norm(ops, x)

    def add(self, ops: Ops, x: Array, delta: Array) -> tuple[Array, Array]:
        """(norm(x + delta), the same); x is given up."""
        normed = self.norm.add(ops, x, delta)[1]
        return normed, normed


@dataclass(frozen=True)
class NormBeside:
    """The norm of x before something is added to it: what two layers beside each other read."""

    norm: Norm

    def __call__(self, ops: Ops, x: Array) -> Array:
        """The norm of x."""
        return self.norm(ops, x)

    def add(self, ops: Ops, x: Array, delta: Array) -> tuple[Array, Array]:
        """(x + delta, the norm of x); x is given up."""
        h = self.norm(ops, x)
        return ops.add(x, delta), h


@dataclass(frozen=True)
class NormOfSum:
    """The norm of a sum that the stream does not become: what a block adds is for the norm alone (Zamba2)."""

    norm: Norm

    def __call__(self, ops: Ops, x: Array) -> Array:
        """The norm of x."""
        return self.norm(ops, x)

    def add(self, ops: Ops, x: Array, delta: Array) -> tuple[Array, Array]:
        """(x, the norm of x + delta); delta is given up."""
        return x, self.norm(ops, ops.add(delta, x))


@dataclass(frozen=True)
class ProjectedNorm:
    """A norm followed by a projection: the way from the stream to a head of another width."""

    norm: Norm
    linear: Linear

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, width of the head]."""
        return self.linear(ops, self.norm(ops, x))

    def add(self, ops: Ops, x: Array, delta: Array) -> tuple[Array, Array]:
        """(x + delta, what is made of it); x is given up."""
        x, h = self.norm.add(ops, x, delta)
        return x, self.linear(ops, h)


@dataclass(frozen=True)
class GatedMlp:
    """down(act(gate) * up) (Shazeer 2020)."""

    gate_up: Product
    down: Product
    activation: str

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(ops, ops.gated_activation(self.gate_up(ops, x), self.activation))


@dataclass(frozen=True)
class ClampedMlp:
    """down((up + shift) * gate * sigmoid(alpha * gate)), with gate and up limited (gpt-oss)."""

    gate_up: Product
    down: Linear
    clamp: Clamp

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(ops, ops.clamped_swiglu(self.gate_up(ops, x), *self.clamp))


@dataclass(frozen=True)
class FusedGatedMlp:
    """A gated MLP in one call, whose wide intermediates never reach memory."""

    gate_up: Linear
    down: Linear
    activation: str

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, hidden]."""
        first, second = self.gate_up, self.down
        return ops.gated_mlp(x, first.weight, first.bias, second.weight, second.bias, self.activation)


@dataclass(frozen=True)
class PlainMlp:
    """down(act(up))."""

    up: Linear
    down: Linear
    activation: str

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(ops, ops.activation(self.up(ops, x), self.activation))


@dataclass(frozen=True)
class FusedPlainMlp:
    """An MLP without a gate in one call, whose wide rows never reach memory."""

    up: Linear
    down: Linear
    activation: str

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, hidden]."""
        first, second = self.up, self.down
        return ops.plain_mlp(x, first.weight, first.bias, second.weight, second.bias, self.activation)


@dataclass(frozen=True)
class Scale:
    """x * factor."""

    factor: float

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """Scale x in place."""
        return ops.scale(x, self.factor)


@dataclass(frozen=True)
class Project:
    """A projection of the embedded tokens to the width of the stream (OPT-350m)."""

    linear: Linear

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """A new tensor."""
        return self.linear(ops, x)


@dataclass(frozen=True)
class SoftCap:
    """cap * tanh(x / cap)."""

    cap: float

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """Cap x in place."""
        return ops.softcap(x, self.cap)


@dataclass(frozen=True)
class Clip:
    """x limited to [-limit, limit]."""

    limit: float

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """Clip x in place."""
        return ops.clip(x, self.limit)


@dataclass(frozen=True)
class Positions:
    """x + table[position + offset]: learned positions."""

    table: Array
    offset: int

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """Add positions to x in place."""
        return ops.add_positions(x, batch.positions, self.table, self.offset)


@dataclass(frozen=True)
class ScaledQueries:
    """The first `columns` of x times factors[(position + ahead) // step] (`QueryScale`)."""

    factors: Array
    columns: int
    step: int
    ahead: int

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """Scale queries in place."""
        return ops.scale_rows(x, self.factors, self.columns, batch.positions, self.step, self.ahead)


@dataclass(frozen=True)
class Normed:
    """The norm of x (BLOOM's embedding)."""

    norm: Norm

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """A new tensor."""
        return self.norm(ops, x)


@dataclass(frozen=True)
class NormSpans:
    """Norm of each run of `span` columns from `start` on: whole rows of queries or keys, or heads of unlike weights."""

    weight: Array
    start: int
    span: int
    centered: bool
    eps: float

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """Norm spans of x in place."""
        return ops.norm_spans(x, self.weight, self.start, self.span, self.centered, self.eps)


@dataclass(frozen=True)
class RowNorm(NormSpans):
    """`NormSpans` of all heads of a row together."""
