"""Embeddings of n-grams, which a layer is given by gates for each of its streams (Qwen4-Exp)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.parts import Embed, Linear
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.convolution import Convolution
from quire.ops.layout import LayerCache
from quire.ops.ngrams import NgramHash


@dataclass(frozen=True)
class NgramEmbedding:
    """Rows of `table` that the last tokens name.

    `digits` [V, c] f32: those of a token's number, once for each token that an n-gram reaches back. They are rows of
    the cache, of which the convolution `recall` picks for each distance those of the token so far back: so chunks,
    shared prefixes and drafts find the tokens before them as they find all else.
    """

    digits: Array
    recall: Convolution
    hash: NgramHash
    table: Embed

    def __call__(self, ops: Ops, batch: Batch, cache: LayerCache) -> Array:
        """The n-grams of the tokens of `batch` -> [T, heads * width]; digits are written to `cache`."""
        paged = batch.cu_q, batch.context, batch.block_tables
        rows = ops.embedding(batch.tokens, self.digits, None)
        before = ops.causal_conv(rows, cache[-1], batch.slots, paged, self.recall, batch.tree)
        found = self.table(ops, ops.ngram_rows(batch.tokens, before, self.hash))
        return found.reshape(len(batch.tokens), -1)


@dataclass(frozen=True)
class GatedNgrams:
    """What is added to each of n streams: values of n-grams, gated, and a convolution of these, normed.

    `key` makes a row for each stream, and `value` one for all. The weights of norms are f32 of all streams.
    """

    embedding: NgramEmbedding
    key: Linear
    value: Linear
    key_norm: Array
    query_norm: Array
    value_norm: Array
    conv: Convolution
    hidden: int
    eps: float

    def __call__(self, ops: Ops, x: Array, batch: Batch, cache: LayerCache) -> Array:
        """x [T, n * hidden], in place; rows of the convolution, and what is kept of tokens, are written to `cache`."""
        found = self.embedding(ops, batch, cache)
        key = self._normed(ops, self.key(ops, found), self.key_norm)
        query = self._normed(ops, ops.take_columns(x, 0, x.shape[1]), self.query_norm)
        gated = ops.gate_values(key, query, self.value(ops, found))
        rows = self._normed(ops, ops.take_columns(gated, 0, gated.shape[1]), self.value_norm)
        paged = batch.cu_q, batch.context, batch.block_tables
        mixed = ops.causal_conv(rows, cache[-2], batch.slots, paged, self.conv, batch.tree)
        return ops.add(x, ops.add(gated, mixed))

    def _normed(self, ops: Ops, rows: Array, weight: Array) -> Array:
        """Norm each stream of rows [T, n * hidden] in place."""
        normed: Array = ops.norm_spans(rows, weight, 0, self.hidden, False, self.eps)
        return normed
