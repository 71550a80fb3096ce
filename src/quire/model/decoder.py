"""The decoder: a residual stream that every block reads, and adds to. No family, no format and no parallel word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.model.batch import Batch
from quire.model.linear import Linear
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops
from quire.ops.layout import KVCache


@dataclass(frozen=True)
class Layer:
    """One layer's weights and facts. `qk_norms`: per-head norm weights of queries and keys, or None."""

    attn_norm: Tensor
    qkv: Linear
    qk_norms: tuple[Tensor, Tensor] | None
    rope: Tensor
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    attend: AttentionSpec
    eps: float
    activation: str


Block = Callable[[Ops, Layer, Tensor, Tensor, Batch, KVCache], Tensor]


def sequential_block(ops: Ops, layer: Layer, x: Tensor, h: Tensor, batch: Batch, cache: KVCache) -> Tensor:
    """x += attention(h); return mlp(norm(x)), which the caller adds. x, h [T, hidden], h = norm(x)."""
    qkv = layer.qkv(ops, h)
    qkv = ops.rope_and_cache(qkv, batch.positions, layer.rope, batch.slots, cache, layer.qk_norms, layer.eps)
    attended = ops.attention(qkv, cache, batch.cu_q, batch.context, batch.block_tables, layer.attend)
    h = ops.add_rmsnorm(x, layer.o(ops, attended), layer.mlp_norm, layer.eps)
    return layer.down(ops, ops.gated_activation(layer.gate_up(ops, h), layer.activation))


@dataclass(frozen=True)
class Decoder:
    """Tokens to logits. `embed` [V, hidden]; `block` is chosen at build by how the family joins attention and MLP."""

    ops: Ops
    embed: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    head: Linear
    eps: float
    block: Block = sequential_block

    def __call__(self, batch: Batch, caches: Sequence[KVCache]) -> Tensor:
        """Logits f32 [R, V] of the rows `batch.logit_rows`; keys and values of all T rows are written to `caches`."""
        ops = self.ops
        (first, *rest), (cache, *others) = self.layers, caches
        x = ops.embedding(batch.tokens, self.embed)
        h = ops.rmsnorm(x, first.attn_norm, self.eps)
        delta = self.block(ops, first, x, h, batch, cache)
        for layer, cache in zip(rest, others, strict=True):
            h = ops.add_rmsnorm(x, delta, layer.attn_norm, self.eps)
            delta = self.block(ops, layer, x, h, batch, cache)
        rows = ops.take_rows(x, delta, batch.logit_rows)
        return self.head(ops, ops.rmsnorm(rows, self.final_norm, self.eps))
