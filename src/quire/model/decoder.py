"""The decoder: a residual stream that every block reads, and adds to. No family, no format and no parallel word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from quire.model.batch import Batch
from quire.model.linear import Linear
from quire.model.parts import Mlp, Norm, Step
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops
from quire.ops.layout import KVCache
from quire.ops.weights import PackedTable


@dataclass(frozen=True)
class Layer:
    """One layer's weights and facts.

    `qkv_steps` change the output of `qkv`; `qk_norms`: per-head norm weights of queries and keys, or None, with `eps`.
    The post norms are of what attention and MLP add, for blocks that norm it. `cross`: in decoders with an encoder.
    """

    attn_norm: Norm
    qkv: Linear
    qkv_steps: tuple[Step, ...]
    qk_norms: tuple[Tensor, Tensor] | None
    eps: float
    rope: Tensor
    attend: AttentionSpec
    o: Linear
    attn_post_norm: Norm
    mlp_norm: Norm
    mlp: Mlp
    mlp_post_norm: Norm
    attention: Attention
    cross: CrossAttention | None = None


@dataclass(frozen=True)
class CrossAttention:
    """Attention over the encoder's output, whose keys and values are in the cache. `still`: an empty rope table."""

    norm: Norm
    q: Linear
    still: Tensor
    attend: AttentionSpec
    o: Linear

    def __call__(self, ops: Ops, h: Tensor, view: Batch, cache: KVCache) -> Tensor:
        """h [T, hidden] -> [T, hidden]; in `view` each row is a sequence that sees all of its encoder's tokens."""
        layout = cache.layout
        q = self.q(ops, h)
        qkv = ops.rope_queries(q, view.positions, self.still, 2 * layout.kv_heads, layout.head_dim, None, 1.0)
        return self.o(ops, ops.attention(qkv, cache, view.cu_q, view.context, view.block_tables, self.attend))


Attention = Callable[[Ops, "Layer", Tensor, Batch, KVCache], Tensor]
Block = Callable[[Ops, Layer, Tensor, Tensor, Batch, KVCache], Tensor]


def own_attention(ops: Ops, layer: Layer, h: Tensor, batch: Batch, cache: KVCache) -> Tensor:
    """h [T, hidden] -> [T, hidden]; keys and values of the rows are written to `cache`."""
    qkv = layer.qkv(ops, h)
    for step in layer.qkv_steps:
        qkv = step(ops, qkv, batch)
    qkv = ops.rope_and_cache(qkv, batch.positions, layer.rope, batch.slots, cache, layer.qk_norms, layer.eps)
    attended = ops.attention(qkv, cache, batch.cu_q, batch.context, batch.block_tables, layer.attend, batch.tree)
    return layer.o(ops, attended)


def reading_attention(ops: Ops, layer: Layer, h: Tensor, batch: Batch, cache: KVCache) -> Tensor:
    """Like `own_attention` with queries only: `cache` is that of an earlier layer, which wrote the rows' keys."""
    q = layer.qkv(ops, h)
    for step in layer.qkv_steps:
        q = step(ops, q, batch)
    norm = layer.qk_norms[0] if layer.qk_norms else None
    qkv = ops.rope_queries(
        q, batch.positions, layer.rope, 2 * cache.layout.kv_heads, cache.layout.head_dim, norm, layer.eps
    )
    return layer.o(
        ops, ops.attention(qkv, cache, batch.cu_q, batch.context, batch.block_tables, layer.attend, batch.tree)
    )


def sequential_block(ops: Ops, layer: Layer, x: Tensor, h: Tensor, batch: Batch, cache: KVCache) -> Tensor:
    """x += attention(h); return mlp(norm(x)), which the caller adds. x, h [T, hidden], h = norm(x)."""
    h = layer.mlp_norm.add(ops, x, layer.attention(ops, layer, h, batch, cache))
    return layer.mlp(ops, h)


def post_norm_block(ops: Ops, layer: Layer, x: Tensor, h: Tensor, batch: Batch, cache: KVCache) -> Tensor:
    """Like `sequential_block`, with a norm of what attention and what the MLP add (OLMo 2, Gemma 2)."""
    attended = layer.attn_post_norm(ops, layer.attention(ops, layer, h, batch, cache))
    return layer.mlp_post_norm(ops, layer.mlp(ops, layer.mlp_norm.add(ops, x, attended)))


def parallel_block(ops: Ops, layer: Layer, x: Tensor, h: Tensor, batch: Batch, cache: KVCache) -> Tensor:
    """Attention and MLP read the same norm of x and are added together (Wang and Komatsuzaki 2021)."""
    return ops.add(layer.attention(ops, layer, h, batch, cache), layer.mlp(ops, h))  # type: ignore[no-any-return]


def parallel_two_norms_block(ops: Ops, layer: Layer, x: Tensor, h: Tensor, batch: Batch, cache: KVCache) -> Tensor:
    """Like `parallel_block`, with a norm of its own for the MLP (GPT-NeoX)."""
    return ops.add(layer.attention(ops, layer, h, batch, cache), layer.mlp(ops, layer.mlp_norm(ops, x)))  # type: ignore[no-any-return]


def crossed_block(ops: Ops, layer: Layer, x: Tensor, h: Tensor, batch: Batch, cache: KVCache) -> Tensor:
    """Like `sequential_block`, with attention over an encoder's output between attention and MLP (T5)."""
    assert layer.cross is not None and batch.cross is not None, "decoders with an encoder are loaded and fed with them"
    h = layer.cross.norm.add(ops, x, layer.attention(ops, layer, h, batch, cache))
    h = layer.mlp_norm.add(ops, x, layer.cross(ops, h, batch.cross, cache))
    return layer.mlp(ops, h)


@dataclass(frozen=True)
class Decoder:
    """Tokens to logits. `embed` [V, hidden]; `block` is chosen at build by how the family joins attention and MLP.

    `embed_steps` change the embedded tokens, `head_steps` the logits.
    """

    ops: Ops
    embed: Tensor | PackedTable
    embed_steps: tuple[Step, ...]
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Linear
    head_steps: tuple[Step, ...] = ()
    block: Block = sequential_block
    recordable: bool = True

    def __call__(self, batch: Batch, caches: Sequence[KVCache], views: Sequence[Batch] = ()) -> Tensor:
        """Logits f32 [R, V] of the rows `batch.logit_rows`; keys and values of all T rows are written to `caches`.

        One cache per layer. `views`: the batch as each layer sees it, where layers have block tables of their own.
        """
        ops = self.ops
        (first, *rest), (cache, *others) = self.layers, caches
        view, *later = views or (batch,) * len(caches)
        x = ops.embedding(batch.tokens, self.embed)
        for step in self.embed_steps:
            x = step(ops, x, batch)
        ops.next_layer()
        delta = self.block(ops, first, x, first.attn_norm(ops, x), view, cache)
        for layer, cache, view in zip(rest, others, later, strict=True):
            ops.next_layer()
            h = layer.attn_norm.add(ops, x, delta)
            delta = self.block(ops, layer, x, h, view, cache)
        logits = self.head(ops, self.final_norm(ops, ops.take_rows(x, delta, batch.logit_rows)))
        for step in self.head_steps:
            logits = step(ops, logits, batch)
        return logits

    def warm_up(self, batch: Batch, caches: Sequence[KVCache]) -> None:
        """Run `batch` through two layers, which take the same memory between ops as all do."""
        layers = self.layers[:2]
        replace(self, layers=layers)(batch, caches[: len(layers)])
