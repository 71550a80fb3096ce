"""What Gemma 4 does in a layer beside attention and MLP: values that are keys, inputs of each layer, a scaled stream.

Gemma Team 2026; per-layer embeddings: Gemma Team 2025 (Gemma 3n).
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.decoder import Inputs, Wanted, chosen
from quire.model.net.parts import Embed, Embedding, Norm, Product, RowChange
from quire.ops.arrays import Array
from quire.ops.backend import Ops


@dataclass(frozen=True)
class KeysAsValues:
    """Queries and keys, with the keys once more as values: `width` columns from `start` on."""

    start: int
    width: int

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """x [T, start + width] -> [T, start + 2 * width], a new tensor."""
        joined: Array = ops.join_columns((x, ops.take_columns(x, self.start, self.width)))
        return joined


@dataclass(frozen=True)
class ScaledStream:
    """The stream, and what is added to it, times `factor`."""

    factor: float

    def __call__(self, ops: Ops, x: Array, delta: Array, batch: Batch, wanted: Wanted) -> tuple[Array, Array]:
        """Scale x and delta [R, hidden] in place."""
        return ops.scale(x, self.factor), ops.scale(delta, self.factor)


@dataclass(frozen=True)
class MappedEmbedding(Embedding):
    """Rows of a table in a mapped file, of which nothing stays in this process's memory."""

    def __call__(self, ops: Ops, tokens: Array) -> Array:
        """tokens [T] int32 -> [T, width]."""
        rows = super().__call__(ops, tokens)
        ops.forget_rows(self.table)
        return rows


@dataclass(frozen=True)
class SummedRows:
    """Rows of several tables, each of which has some of the tokens."""

    tables: tuple[Embed, ...]

    def __call__(self, ops: Ops, tokens: Array) -> Array:
        """tokens [T] int32 -> [T, width]."""
        first, *others = (table(ops, tokens) for table in self.tables)
        for rows in others:
            first = ops.add(first, rows)
        return first


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """What layers are given of each token: norm(rows(x)) + factor * table[token], `width` numbers each.

    `norm` [layers * width] f32: the weight of the norm of each layer's numbers, once a layer. `eps`: of x that is not
    scaled.
    """

    table: Embed
    rows: Product
    norm: Array
    width: int
    eps: float
    factor: float

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """x [T, hidden], the embedded tokens -> [T, layers * width] f32."""
        given = ops.norm_spans(self.rows(ops, x), self.norm, 0, self.width, False, self.eps)
        found: Array = ops.add(given, ops.scale(self.table(ops, batch.tokens), self.factor))
        return found


@dataclass(frozen=True)
class InputsOfTokens:
    """`PerLayerEmbeddings` of a stage that is not given embedded tokens: they are looked up once more."""

    embed: Embed
    changes: tuple[RowChange, ...]
    own: Inputs

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """x [T, hidden], the stream -> [T, layers * width] f32."""
        embedded = self.embed(ops, batch.tokens)
        for change in self.changes:
            embedded = change(ops, embedded, batch)
        return self.own(ops, embedded, batch)


@dataclass(frozen=True)
class GivenInputs:
    """project(act(gate(x)) * given), normed, is added to the stream x; then it is scaled by `factor`.

    `layer`: which of the batch's inputs are given. The norm's weight has the factor in it.
    """

    layer: int
    gate: Product
    project: Product
    norm: Norm
    activation: str
    factor: float

    def __call__(self, ops: Ops, x: Array, delta: Array, batch: Batch, wanted: Wanted) -> tuple[Array, Array]:
        """x, delta [R, hidden], given up -> the stream, scaled, and what is added to it."""
        assert batch.inputs is not None, "decoders of such layers make inputs"
        x = ops.add(x, delta)
        gate = self.gate(ops, x)
        width = gate.shape[1]
        given = chosen(ops, ops.take_columns(batch.inputs, self.layer * width, width), wanted)
        inner = ops.gated_activation(ops.join_columns((gate, given)), self.activation)
        return ops.scale(x, self.factor), self.norm(ops, self.project(ops, inner))
