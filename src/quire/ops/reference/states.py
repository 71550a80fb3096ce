"""Attention without a mask, for encoders of images, and attention in two parts.

The parts: what splits of keys leave of each row, wherever they are, and the fold of that to rows. A split is `SPLIT`
keys from a multiple of `SPLIT` on. The op `attention` folds the states of a row's splits in ascending order, so rows
have its bits however the splits are spread (the parts of Flash-Decoding, 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.core.parallel import SPLIT
from quire.core.windows import first_seen
from quire.ops.attention_spec import AttentionSpec
from quire.ops.layout import KVCache
from quire.ops.op import op
from quire.ops.reference.caches import logical, write

LOG2E = 1.4426950408889634


@op(tolerance=2e-2)
def attention_states(
    qkv: Tensor,
    cache: KVCache,
    cu_q: Tensor,
    context: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """What `attention` has of each row after each split whose blocks are in `cache`: f32 [N, heads * (head_dim + 2)].

    Arguments as of `attention`; entries of `block_tables` may be -1, for all blocks of a split that are read or for
    none: others have it. Row t sees starts[t + 1] - starts[t] splits that are here (`starts` int64 [T + 1]; the last is
    N); its states starts[t] and on are theirs, ascending. A state of a head is a number m that scores are taken less
    of, the sum of 2^(score * log2(e) - m) over the split, and the sum of these numbers times values. m itself is free.
    """
    d, hk, size = cache.layout.head_dim, cache.layout.kv_heads, cache.layout.block_size
    q = qkv.view(len(qkv), -1, d)[:, : -2 * hk]
    out = torch.zeros(int(starts[-1]), q.shape[1], d + 2)
    for s in range(len(context)):
        for row in range(int(cu_q[s]), int(cu_q[s + 1])):
            end, at = int(context[s]) - int(cu_q[s + 1]) + row + 1, int(starts[row])
            begin = first_seen(spec.window, end - 1)
            for split in range(begin // SPLIT, -(-end // SPLIT)):
                keys = torch.arange(max(begin, split * SPLIT), min(end, (split + 1) * SPLIT))
                blocks = block_tables[s, keys // size].long()
                if blocks[0] < 0:
                    continue
                out[at] = _state(q[row], cache, blocks, keys, end - 1, spec)
                at += 1
    return out.flatten(1)


def _state(q: Tensor, cache: KVCache, blocks: Tensor, keys: Tensor, row: int, spec: AttentionSpec) -> Tensor:
    """[heads, d + 2] of queries q [heads, d] at position `row` over the positions `keys`, which lie in `blocks`."""
    at, repeat = keys % cache.layout.block_size, len(q) // cache.layout.kv_heads
    each = torch.arange(len(keys))
    k, v = (t[each, :, at].repeat_interleave(repeat, 1) for t in logical(cache, blocks))
    scores = torch.einsum("hd,nhd->hn", q, k) * spec.scale
    if spec.softcap:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if spec.alibi is not None:
        scores = scores + spec.alibi[:, None] * (keys - row)
    if spec.bias is not None:
        scores = scores + spec.bias[:, (row - keys).clamp(0, spec.bias.shape[1] - 1)]
    scores = scores * LOG2E
    most = scores.amax(1, keepdim=True)
    p = torch.exp2(scores - most)
    return torch.cat((most, p.sum(1, keepdim=True), torch.einsum("hn,nhd->hd", p, v)), 1)


@op(tolerance=2e-5)
def fold_states(states: Tensor, starts: Tensor, order: Tensor, heads: int, sinks: Tensor | None) -> Tensor:
    """Rows of `attention` from the states of all their splits.

    states [N, heads * (d + 2)] f32 as `attention_states` leaves them, `starts` int64 [T + 1]: row t is folded from
    states order[starts[t]] .. order[starts[t + 1] - 1] (`order` int64), one after the other; each row has one at least.
    `sinks` as in `AttentionSpec`. Returns f32 [T, heads * d].
    """
    found = states.view(len(states), heads, -1)
    out = torch.empty(len(starts) - 1, heads, found.shape[2] - 2)
    for t in range(len(out)):
        parts = found[order[int(starts[t]) : int(starts[t + 1])]]
        most = parts[..., 0].amax(0)
        if sinks is not None:
            most = torch.maximum(most, sinks * LOG2E)
        weight = torch.exp2(parts[..., 0] - most)
        total = (weight * parts[..., 1]).sum(0)
        if sinks is not None:
            total = total + torch.exp2(sinks * LOG2E - most)
        out[t] = (weight[..., None] * parts[..., 2:]).sum(0) / total[:, None]
    return out.flatten(1)


@op(tolerance=0.0)
def cache_rows(kv: Tensor, slots: Tensor, cache: KVCache) -> None:
    """Store keys and values kv [T, 2 * kv_heads * head_dim] f32 at `slots` [T] int64; -1: not stored."""
    rows = kv.view(len(kv), 2, cache.layout.kv_heads, cache.layout.head_dim)
    write(cache, slots, rows[:, 0], rows[:, 1])


@op(tolerance=2e-2)
def whole_attention(q: Tensor, cache: KVCache, context: Tensor, block_tables: Tensor, scale: float) -> Tensor:
    """Softmax(q k^T * scale) v without a mask: f32 [S * n, heads * head_dim] of queries q [S, n, heads * head_dim] f32.

    The n rows q[s] see the context[s] (int32 [S], at least 1) tokens of the blocks block_tables[s] (int32 [S,
    max_blocks]), where their own keys are, too. As many heads of keys as of queries.
    """
    heads, d = cache.layout.kv_heads, cache.layout.head_dim
    out = torch.zeros(len(q), heads, q.shape[1], d)
    for s, length in enumerate(context.tolist()):
        table = block_tables[s, : -(-length // cache.layout.block_size)].long()
        k, v = (t.transpose(0, 1).flatten(1, 2)[:, :length].float() for t in logical(cache, table))
        scores = q[s].view(-1, heads, d).transpose(0, 1) @ k.transpose(1, 2) * scale
        out[s] = torch.softmax(scores, -1) @ v
    return out.transpose(1, 2).flatten(0, 1).flatten(1)
