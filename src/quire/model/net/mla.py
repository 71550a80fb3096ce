"""Multi-head latent attention (DeepSeek-AI 2024): its part of a layer, and how it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.model.batch import Batch
from quire.model.net.decoder import Layer, Wanted, chosen
from quire.model.net.linear import Linear
from quire.model.net.parts import RmsNorm
from quire.ops.backend import Ops
from quire.ops.layout import KVCache
from quire.ops.mla import EPS, Heads
from quire.ops.moe import padded_rows
from quire.ops.weights import Packed, Weight
from quire.quant.base import float_kind

if TYPE_CHECKING:
    from quire.model.load.loader import Loader

Project = Callable[[Ops, Tensor], Tensor]


@dataclass(frozen=True)
class LatentAttention:
    """Attention of a layer whose `qkv` makes a token's latent and the key part that turns.

    `query`: rows [T, hidden] -> [T, heads * (nope + rope)], by way of a smaller space or straight. `into` [rank, nope]
    per head carries the part that does not turn into the latents' space; `out` [value, rank] carries results back. All
    rows, of prompts too, take this absorbed way: another order of products would give other bits in other batches.
    """

    query: Project
    heads: Heads
    into: Packed
    out: Packed
    rank: int
    value: int

    def __call__(self, ops: Ops, layer: Layer, h: Tensor, batch: Batch, cache: KVCache, wanted: Wanted) -> Tensor:
        """h [T, hidden] -> [R, hidden]; latents and rotated keys of the rows are written to `cache`."""
        q, kv = self.query(ops, h), layer.qkv(ops, h)
        q = ops.latent_rope_and_cache(q, kv, batch.positions, layer.rope, batch.slots, cache, self.heads)
        latent = ops.head_linear(q, self.into, self.heads.count, self.rank)
        attended = ops.latent_attention(
            latent, q, cache, batch.cu_q, batch.context, batch.block_tables, layer.attend.scale
        )
        attended = chosen(ops, attended, wanted)
        return layer.o(ops, ops.head_linear(attended, self.out, self.heads.count, self.value))


@dataclass(frozen=True)
class LowRank:
    """up(norm(down(h))): queries by way of a latent of their own."""

    down: Linear
    norm: RmsNorm
    up: Linear

    def __call__(self, ops: Ops, h: Tensor) -> Tensor:
        """h [T, hidden] -> [T, heads * width]."""
        return self.up(ops, self.norm(ops, self.down(ops, h)))


def load_latent(loader: Loader, index: int) -> tuple[Linear, LatentAttention]:
    """`qkv` and attention of layer `index`, packed."""
    spec, mla = loader.opened.spec, loader.opened.spec.mla
    turn = halves(mla.rope) if mla.interleaved else torch.arange(mla.rope)
    down = loader.linear(("kv_a",), index, torch.cat((torch.arange(mla.rank), mla.rank + turn)))
    per_head = torch.cat((torch.arange(mla.nope), mla.nope + turn))
    rows = (torch.arange(spec.heads)[:, None] * spec.head_dim + per_head).flatten()
    norm = loader.vector("kv_a_norm", index)
    assert norm is not None

    @cache
    def kv_b() -> Tensor:
        return loader.matrix(("kv_b",), index)[0].dequantize().view(spec.heads, mla.nope + mla.value, mla.rank)

    into = _per_head(loader, f"{index}.kv_b.into", mla.rank, mla.nope, lambda: kv_b()[:, : mla.nope].transpose(1, 2))
    out = _per_head(loader, f"{index}.kv_b.out", mla.value, mla.rank, lambda: kv_b()[:, mla.nope :])
    loader.count("kv_b", into.kind, into.nbytes + out.nbytes)
    return down, LatentAttention(_query(loader, index, rows), Heads(spec.heads, norm), into, out, mla.rank, mla.value)


def halves(dim: int) -> Tensor:
    """Order in which pairs (2i, 2i + 1) of `dim` numbers become pairs (i, i + dim / 2)."""
    return torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2)))


def _query(loader: Loader, index: int, rows: Tensor) -> Project:
    weight = loader.vector("q_a_norm", index)
    if weight is None:
        return loader.linear(("q",), index, rows)
    return LowRank(loader.linear(("q_a",), index), RmsNorm(weight, EPS), loader.linear(("q_b",), index, rows))


def _per_head(loader: Loader, name: str, n: int, k: int, make: Callable[[], Tensor]) -> Packed:
    """Matrices [heads, n, k] in the compute dtype below each other, as `head_linear` wants them: `make`'s, or kept."""
    rows = padded_rows(n)
    kept = loader.cache.get(name, loader.opened.spec.heads * len(rows), k) if loader.cache is not None else None
    if kept is not None:
        return kept.packed
    packed = loader.ops.pack(Weight(float_kind(loader.dtype), make()[:, rows].flatten(0, 1).to(loader.dtype)))
    if loader.cache is not None:
        loader.cache.put(name, packed, None)
    return packed
