"""The definition of a causal convolution over tokens in a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.autograd_cache import AutogradCache
from quire.ops.convolution import Convolution, check_convolution
from quire.ops.layout import KVCache
from quire.ops.lazy import torch_dtype
from quire.ops.op import op
from quire.ops.reference.caches import logical, write


@op(tolerance=2e-6)
def causal_conv(
    x: Tensor,
    cache: KVCache,
    slots: Tensor,
    paged: tuple[Tensor, Tensor, Tensor],
    conv: Convolution,
    tree: Tensor | None = None,
) -> Tensor:
    """act(bias + sum_k weight[k] * u[t - taps + 1 + k]) of each channel, u[t] the row of token t: f32 [T, n].

    x f32 [T, n], or [T, 3 n] where the convolution is gated (`Convolution`). The row u[t] of each of x is stored at
    `slots` [T] int64 (block * block_size + offset; -1: not), in the format of the cache, and counts everywhere as it
    was rounded for that: no cut of a prompt changes a bit. Rows before a sequence's first here are read from its
    blocks, those before position 0 are 0. `paged`: cu_q, context and block_tables, as in `attention`; rows behind the
    last sequence are 0. The sum is in f32, from the bias and the oldest row on. `tree` as in `attention`: a row of a
    draft that branches follows its ancestors there.
    """
    if not isinstance(cache, AutogradCache):
        check_convolution(conv, cache)
    n, layout, (cu_q, context, block_tables) = conv.width, cache.layout, paged
    u = x[:, :n] * x[:, 2 * n :] if conv.gated else x
    u = u.to(torch_dtype(layout.dtype)).to(x.dtype)
    ends, out = cu_q.tolist(), []
    for s, length in enumerate(context.tolist()):
        begin, end = ends[s], ends[s + 1]
        start = length - (end - begin)
        seen = torch.cat((_past(cache, block_tables[s], start, conv, u), u[begin:end]))
        read = _rows_read(conv.taps, [0] * (end - begin) if tree is None else tree[begin:end].tolist())
        y = u.new_zeros(end - begin, n) if conv.bias is None else conv.bias.expand(end - begin, n)
        for k in range(conv.taps):
            y = y + conv.weight[k] * seen[read[:, k]]
        out.append(y)
    write(cache, slots, u[:, None, : n // 2], u[:, None, n // 2 :])
    y = torch.cat((*out, u.new_zeros(len(x) - ends[-1], n)))
    if conv.activation:
        y = torch.nn.functional.silu(y)
    return x[:, n : 2 * n] * y if conv.gated else y


def _rows_read(taps: int, tree: list[int]) -> Tensor:
    """Which of `taps` - 1 rows and the rows of `tree` behind them each of the latter reads: int64 [T, taps]."""
    rows = []
    for i, mask in enumerate(tree):
        root = i - (mask & (1 << 64) - 1).bit_length() + 1 if mask else i
        own = [root + j for j in range(64) if mask >> j & 1] if mask else [i]
        rows.append([*range(1 - taps, root), *own][-taps:])
    return torch.tensor(rows, dtype=torch.long).view(len(rows), taps) + taps - 1


def _past(cache: KVCache, blocks: Tensor, start: int, conv: Convolution, like: Tensor) -> Tensor:
    """The `taps` - 1 rows before position `start` of the sequence that has `blocks`: [taps - 1, n]."""
    size, count = cache.layout.block_size, min(conv.taps - 1, start)
    before = like.new_zeros(conv.taps - 1 - count, conv.width)
    if not count:
        return before
    at = torch.arange(start - count, start)
    block = blocks[at // size].long()
    if isinstance(cache, AutogradCache):
        place, keys, values = cache.rows()
        rows = place[block * size + at % size]
        found = torch.cat((keys[rows, 0], values[rows, 0]), 1)
    else:
        held = [part[torch.arange(count), 0, at % size] for part in logical(cache, block)]
        found = torch.cat(held, 1).to(like.dtype)
    return torch.cat((before, found))
