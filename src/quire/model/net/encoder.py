"""The encoder of an encoder-decoder, and what the decoder makes of its output (Raffel et al. 2020).

A sequence is [tokens of the encoder, padded to whole blocks | tokens of the decoder]. In the cache of a decoder layer
the slots of the first part hold the keys and values of its cross attention, those of the second its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.model.net.linear import Linear
from quire.model.net.parts import Embed, Mlp, Norm, Product
from quire.ops.backend import Ops
from quire.ops.layout import KVCache

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
class Encoder:
    """Tokens of a sequence to keys and values of the cross attention of every decoder layer.

    `bias` [heads, 2 f + 1] f32: what is added to a score when the key is -f .. f tokens after the query, or beyond.
    `keys_values`: of each decoder layer. `still`: a rope table without columns, which turns nothing.

    One sequence at a time, its attention in f32 by torch: its bits thus depend on no other, and such a step, which
    comes once per request, need not be recorded.
    """

    ops: Ops
    embed: Embed
    layers: tuple[EncoderLayer, ...]
    final_norm: Norm
    bias: Tensor
    head_dim: int
    keys_values: tuple[Linear, ...]
    still: Tensor

    def __call__(self, tokens: Tensor, slots: Tensor, caches: Sequence[KVCache]) -> None:
        """Encode tokens [n] int32 and write the keys and values to `slots` [n] int64 of each layer's cache."""
        ops = self.ops
        ops.begin_step()
        encoded = self.encode(tokens)
        queries = encoded.new_zeros(len(encoded), self.bias.shape[0] * self.head_dim)
        positions = torch.zeros_like(tokens)
        for linear, cache in zip(self.keys_values, caches, strict=True):
            ops.next_layer()
            qkv = torch.cat((queries, linear(ops, encoded)), 1)
            ops.rope_and_cache(qkv, positions, self.still, slots, cache, None, 1.0)

    def encode(self, tokens: Tensor) -> Tensor:
        """Tokens [n] int32 to hidden states [n, hidden]."""
        ops = self.ops
        bias = _sliding(self.bias, len(tokens))
        x = self.embed(ops, tokens)
        h = self.layers[0].attn_norm(ops, x)
        for layer, norm in zip(self.layers, (*(n.attn_norm for n in self.layers[1:]), self.final_norm), strict=True):
            ops.next_layer()
            attended = attend_all(layer.qkv(ops, h), bias, self.head_dim)
            x, h = layer.mlp_norm.add(ops, x, layer.o(ops, attended))
            x, h = norm.add(ops, x, layer.mlp(ops, h))
        return h.clone()


def _sliding(bias: Tensor, n: int) -> Tensor:
    """bias [heads, 2 f + 1] as a view [heads, n, n] for queries from the last to the first, and all keys."""
    furthest = bias.shape[1] // 2
    after = torch.arange(1 - n, n, device=bias.device).clamp(-furthest, furthest)
    return bias[:, after + furthest].unfold(1, n, 1)


def attend_all(qkv: Tensor, bias: Tensor, head_dim: int) -> Tensor:
    """softmax(q k^T + bias) v where everything is seen: qkv [n, 3 heads head_dim] -> [n, heads head_dim] of its dtype.

    `bias` [heads, n, n] is for queries from the last to the first: one row is then the row before moved by one key, so
    that it is a view of a vector per head instead of n^2 numbers.
    """
    n = len(qkv)
    q, k, v = qkv.float().view(n, 3, -1, head_dim).permute(1, 2, 0, 3)
    q, keys = q.flip(1), k.transpose(1, 2)
    out = qkv.new_empty((n, q.shape[0], head_dim))
    for first in range(0, n, QUERIES):
        rows = slice(first, first + QUERIES)
        scores = (q[:, rows] @ keys).add_(bias[:, rows])
        out[rows] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out.flip(0).view(n, -1)
