"""Ops of multi-head latent attention (DeepSeek-AI 2024), with their cases.

The cache holds one latent of `rank` numbers and one rotated key of `rope` numbers per token, for all heads together.
What carries a latent to a head's key and value is absorbed into its query and its result, by one small matrix per head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.core.windows import first_seen
from quire.ops.latents import LatentHeads, LatentReads, rank_of
from quire.ops.layout import KVCache
from quire.ops.op import op
from quire.ops.reference.caches import write_latents
from quire.ops.reference.layers import rmsnorm, rotated
from quire.ops.weights import Packed


@op(tolerance=2e-5)
def head_linear(x: Tensor, w: Packed, heads: int, n: int) -> Tensor:
    """Each head of x [T, heads * width] f32 times its own matrix [n, k], k <= width: f32 [T, heads * n].

    `w` holds the matrices below each other in f32 or bf16, rows of each padded to a multiple of 16; a head's first k
    numbers are read, and rounded to bf16 for bf16 matrices.
    """
    assert w.plain is not None
    rows = x.view(len(x), heads, x.shape[1] // heads)[..., : w.k]
    matrices = w.plain.codes.view(heads, w.n // heads, w.k)[:, :n].float()
    if w.kind == "bf16":
        rows = rows.bfloat16().float()
    return torch.einsum("thk,hnk->thn", rows, matrices).flatten(1)


def turned_latents(
    q: Tensor, kv: Tensor, positions: Tensor, table: Tensor, slots: Tensor, cache: KVCache, heads: LatentHeads
) -> tuple[Tensor, Tensor]:
    """What `latent_rope_and_cache` makes of q and kv, new; what it stores is stored."""
    rank, r = rank_of(cache), 2 * table.shape[2]
    queries = q.view(len(q), heads.count, q.shape[1] // heads.count)
    still, turned = queries.tensor_split((queries.shape[2] - r,), 2)
    q = torch.cat((still, rotated(turned, positions, table)), -1).flatten(1)
    latents = rmsnorm(kv[:, :rank], heads.norm, heads.eps)
    keys = rotated(kv[:, None, rank:], positions, table)[:, 0]
    write_latents(cache, slots, keys, latents)
    return q, torch.cat((latents, keys), 1)


@op(tolerance=2e-5)
def latent_rope_and_cache(
    q: Tensor, kv: Tensor, positions: Tensor, table: Tensor, slots: Tensor, cache: KVCache, heads: LatentHeads
) -> Tensor:
    """Rotate the last r numbers of each head of q in place; norm latents, rotate keys, store both; returns q.

    q [T, heads * width] f32; kv [T, rank + r] f32 is changed in place: rmsnorm of the latent, rotation of the key.
    `table` [max_positions, 2, r / 2] f32: cosines and sines; `positions` [T] int32, `slots` [T] int64.
    """
    turned, normed = turned_latents(q, kv, positions, table, slots, cache, heads)
    kv.copy_(normed)
    return q.copy_(turned)


def unchosen(chosen: Tensor, length: int) -> Tensor:
    """Whether each of `length` tokens is not among those of each row of `chosen` [t, most], bool [t, length]."""
    hidden = torch.ones((len(chosen), length + 1), dtype=torch.bool)  # the last column takes what is no token
    return hidden.scatter(1, chosen.long() % (length + 1), False)[:, :length]


def with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """`scores` [heads, t, s], behind them those of `sinks` [heads] where there are any: [heads, t, s + 1]."""
    return scores if sinks is None else torch.cat((scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)), -1)


@op(tolerance=2e-2)
def latent_attention(
    latent: Tensor,
    q: Tensor,
    cache: KVCache,
    cu_q: Tensor,
    context: Tensor,
    block_tables: Tensor,
    reads: LatentReads,
) -> Tensor:
    """Causal softmax(reads.scale * (latent . c + q_rotated . k)) c over paged latents c and rotated keys k.

    latent [T, heads * rank] f32: queries in the latents' space; q [T, heads * width] f32 holds their rotated part at
    the end of each head. The batch is as in `attention`. Of `reads.chosen` each row reads its tokens alone, otherwise
    those that `reads.window` has; blocks wholly before it are never read.
    `reads.sinks` take part in the softmax and have no latent.
    Returns f32 [T, heads * rank].
    """
    rank, r, size = rank_of(cache), cache.layout.head_dim, cache.layout.block_size
    heads = latent.shape[1] // rank
    width = q.shape[1] // heads
    queries = torch.cat((latent.view(len(q), heads, rank), q.view(len(q), heads, width)[..., width - r :]), -1)
    out = torch.zeros(len(q), heads, rank)
    for s in range(len(context)):
        begin, end, length = int(cu_q[s]), int(cu_q[s + 1]), int(context[s])
        if begin == end:
            continue
        base = length - (end - begin)
        first = first_seen(reads.window, base) // size
        table, at = block_tables[s, first : -(-length // size)].long(), first * size
        values = cache.values[table].flatten(0, 1)[: length - at].float()
        keys = torch.cat((values, cache.keys[table].flatten(0, 1)[: length - at].float()), -1)
        scores = torch.einsum("thd,sd->hts", queries[begin:end], keys) * reads.scale
        key, row = torch.arange(at, length)[None], torch.arange(base, length)[:, None]
        lowest = torch.tensor([first_seen(reads.window, i) for i in range(base, length)])[:, None]
        hidden = (key > row) | (key < lowest)
        if reads.chosen is not None:
            hidden = hidden | unchosen(reads.chosen[begin:end], length)
        scores = with_sinks(scores.masked_fill(hidden, -torch.inf), reads.sinks)
        out[begin:end] = torch.einsum("hts,sr->thr", scores.softmax(-1)[..., : length - at], values)
    return out.flatten(1)
