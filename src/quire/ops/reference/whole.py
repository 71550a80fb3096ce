"""Attention of rows that see all keys of their sequence, whichever come later: encoders of pictures."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.layout import KVCache
from quire.ops.op import op
from quire.ops.reference.caches import logical


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
