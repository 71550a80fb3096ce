"""Attention of rows that see all keys of their sequence, whichever come later: encoders of pictures."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from quire.ops.cases import attention_case, normal
from quire.ops.layout import KVCache, KVLayout
from quire.ops.op import Case, cases, op


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
        k, v = (t.transpose(0, 1).flatten(1, 2)[:, :length].float() for t in cache.logical(table))
        scores = q[s].view(-1, heads, d).transpose(0, 1) @ k.transpose(1, 2) * scale
        out[s] = torch.softmax(scores, -1) @ v
    return out.transpose(1, 2).flatten(0, 1).flatten(1)


@cases("whole_attention")
def whole_attention_cases(g: Generator) -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for block_size in (1, 4, 16, 128):
            for heads, d, each, context in ((4, 72, 40, 40), (1, 64, 1, 700), (2, 32, 17, 90), (3, 80, 100, 640)):
                yield _whole_case(g, KVLayout(block_size, heads, d, dtype), each, (context, context))
        yield _whole_case(g, KVLayout(128, 2, 64, dtype), 576, (1100,))
        yield _whole_case(g, KVLayout(64, 2, 8, dtype), 64, (64,) * 9)


def _whole_case(g: Generator, layout: KVLayout, each: int, contexts: tuple[int, ...]) -> Case:
    case = attention_case(g, layout, layout.kv_heads, tuple((1, context) for context in contexts))
    return {
        "q": normal(g, len(contexts), each, layout.kv_heads * layout.head_dim),
        "cache": case["cache"],
        "context": case["context"],
        "block_tables": case["block_tables"],
        "scale": case["spec"].scale,
    }
