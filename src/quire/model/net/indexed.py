"""Latent attention to tokens that an indexer chooses (DeepSeek-AI 2025, "DeepSeek-V3.2")."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.decoder import Layer, Wanted, chosen
from quire.model.net.gated_attention import OutputGate
from quire.model.net.latent import LatentAttention, LowRankQuery
from quire.model.net.parts import LayerNorm, Linear, Product
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.indexer import Choice
from quire.ops.layout import KVCache, LayerCache


class LastChoice:
    """What the last layer with an indexer chose for the rows of the step under way, which the layers of a model share:
    those behind it without an indexer read it."""

    tokens: Array


@dataclass(frozen=True)
class TokenIndexer:
    """An indexer: of each row the tokens with the highest scores, as many as `choice` says.

    `q` reads the latent of queries, `k` and `weights` the rows; `heads` of queries share a token's key. Scores lack the
    factors that all have in common, which change no order.
    """

    q: Product
    k: Linear
    norm: LayerNorm
    weights: Linear
    heads: int
    choice: Choice

    def __call__(self, ops: Ops, layer: Layer, h: Array, latent: Array, batch: Batch, cache: KVCache) -> Array:
        """h [T, hidden], `latent` [T, q_rank] -> positions [T, n] int32, as of `choose_tokens`; keys of the rows are
        written to `cache`."""
        q = self.kept(ops, layer, h, self.q(ops, latent), batch, cache)
        found: Array = ops.choose_tokens(
            q, self.weights(ops, h), cache, batch.cu_q, batch.context, batch.block_tables, self.choice
        )
        return found

    def kept(self, ops: Ops, layer: Layer, h: Array, q: Array, batch: Batch, cache: KVCache) -> Array:
        """Queries q [T, heads * d], turned; keys of the rows h, turned, are written to `cache`."""
        k = self.norm(ops, self.k(ops, h))
        turned: Array = ops.index_rope_and_cache(q, k, batch.positions, layer.rope, batch.slots, cache, self.heads)
        return turned


@dataclass(frozen=True)
class PooledTokenIndexer(TokenIndexer):
    """Work like `TokenIndexer` of pools of tokens, which have a key each: the mean of their tokens' keys, gated by what
    `gate` makes of a row, [T, d], and `bias` f32 [pool, d] (GLM-5.3-Flash). Nothing turns."""

    gate: Linear | None = None
    bias: Array | None = None

    def kept(self, ops: Ops, layer: Layer, h: Array, q: Array, batch: Batch, cache: KVCache) -> Array:
        """Implement `TokenIndexer.kept`; keys of pools whose last tokens the rows have are written, too."""
        assert self.gate is not None and self.bias is not None, "of such indexers"
        k, gates = self.norm(ops, self.k(ops, h)), self.gate(ops, h)
        ops.pool_keys(k, gates, self.bias, batch.slots, cache, (batch.cu_q, batch.context, batch.block_tables))
        return q


@dataclass(frozen=True)
class IndexedAttention:
    """Latent attention to the tokens that `indexer` chooses, which it leaves in `last`. `gate`: of what heads give.
    `of_latent`: it reads the latent of queries, not the rows."""

    attention: LatentAttention
    query: LowRankQuery
    indexer: TokenIndexer
    last: LastChoice
    gate: OutputGate | None = None
    of_latent: bool = False

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]; latents, rotated keys and index keys of the rows are written to `cache`."""
        latent = self.query.latent(ops, h)
        self.last.tokens = self.indexer(ops, layer, h, latent, batch, cache[1])
        made = self.query.up(ops, latent), layer.qkv(ops, h)
        found = self.attention.values(ops, layer, made, batch, cache, wanted, self.last.tokens)
        if self.gate is not None:
            found = self.gate(ops, found, chosen(ops, self.gate.matrix(ops, latent if self.of_latent else h), wanted))
        return layer.o(ops, found)


@dataclass(frozen=True)
class OfFirst:
    """A matrix that reads the first `width` columns."""

    own: Product
    width: int

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, columns] -> [T, n]."""
        return self.own(ops, ops.take_columns(x, 0, self.width))


@dataclass(frozen=True)
class FollowingAttention:
    """Latent attention to the tokens that an earlier layer left in `last` (IndexShare, GLM-5.2)."""

    attention: LatentAttention
    last: LastChoice
    gate: OutputGate | None = None

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]; latents and rotated keys of the rows are written to `cache`."""
        made = self.attention.query(ops, h), layer.qkv(ops, h)
        found = self.attention.values(ops, layer, made, batch, cache, wanted, self.last.tokens)
        if self.gate is not None:
            found = self.gate(ops, found, chosen(ops, self.gate.matrix(ops, h), wanted))
        return layer.o(ops, found)
