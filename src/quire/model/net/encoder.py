"""The encoder of an encoder-decoder, and what the decoder makes of its output (Raffel et al. 2020).

A sequence is [tokens of the encoder, padded to whole blocks | tokens of the decoder]. In the cache of a decoder layer
the slots of the first part hold the keys and values of its cross attention, those of the second its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.dtypes import I32
from quire.model.net.parts import Embed, Linear, Mlp, Norm, Product
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache

QUERIES = 256
"""Rows of scores that exist at one time: 2,048 tokens and 32 heads would have 537 MB of them."""


@dataclass(frozen=True)
class EncoderLayer:
    """x += attention(norm(x)); x += mlp(norm(x)). Every token sees every other."""

    attn_norm: Norm
    qkv: Linear
    o: Product
    mlp_norm: Norm
    mlp: Mlp


@dataclass(frozen=True)
class KeysValues:
    """What every decoder layer's cross attention reads: `linears` of them, of queries `width` numbers wide. `still`: a
    rope table without columns, which turns nothing."""

    linears: tuple[Linear, ...]
    width: int
    still: Array

    def __call__(self, ops: Ops, encoded: Array, slots: Array, caches: Sequence[LayerCache]) -> None:
        """Write keys and values of rows encoded [n, hidden] to `slots` [n] int64 of each layer's cache."""
        queries = ops.zeros((len(encoded), self.width))
        positions = ops.zeros((len(encoded),), I32)
        for linear, (cache,) in zip(self.linears, caches, strict=True):
            ops.next_layer()
            qkv = ops.join_columns((queries, linear(ops, encoded)))
            ops.rope_and_cache(qkv, positions, self.still, slots, cache, None, 1.0)


@dataclass(frozen=True)
class Encoder:
    """Tokens of a sequence to keys and values of the cross attention of every decoder layer.

    `bias` [heads, 2 f + 1] f32: what is added to a score when the key is -f .. f tokens after the query, or beyond.

    One sequence at a time, its attention in f32 by torch: its bits thus depend on no other, and such a step, which
    comes once per request, need not be recorded.
    """

    ops: Ops
    embed: Embed
    layers: tuple[EncoderLayer, ...]
    final_norm: Norm
    bias: Array
    head_dim: int
    keys_values: KeysValues

    def __call__(self, tokens: Array, slots: Array, caches: Sequence[LayerCache]) -> None:
        """Encode tokens [n] int32 and write the keys and values to `slots` [n] int64 of each layer's cache."""
        ops = self.ops
        ops.begin_step()
        self.keys_values(ops, self.encode(tokens), slots, caches)

    def encode(self, tokens: Array) -> Array:
        """Tokens [n] int32 to hidden states [n, hidden]."""
        from quire.model.net.bidirectional import everything_seen  # torch's products, whose bits answers have

        ops = self.ops
        attend = everything_seen(self.bias, len(tokens), self.head_dim)
        x = self.embed(ops, tokens)
        h = self.layers[0].attn_norm(ops, x)
        for layer, norm in zip(self.layers, (*(n.attn_norm for n in self.layers[1:]), self.final_norm), strict=True):
            ops.next_layer()
            attended = ops.put(attend(layer.qkv(ops, h)))
            x, h = layer.mlp_norm.add(ops, x, layer.o(ops, attended))
            x, h = norm.add(ops, x, layer.mlp(ops, h))
        kept: Array = ops.copy_out(h)
        return kept
