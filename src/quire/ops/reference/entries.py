"""The definitions of ops of entries, rows that stand for some tokens each (`quire.ops.entries`)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.autograd_cache import AutogradCache
from quire.ops.entries import EntryReads, Pool, every_of
from quire.ops.indexer import index_dim
from quire.ops.layout import KVCache
from quire.ops.lazy import torch_dtype
from quire.ops.op import op
from quire.ops.reference.layers import rmsnorm, rotated

Paged = tuple[Tensor, Tensor, Tensor]


def rows_at(cache: KVCache, blocks: Tensor, at: Tensor) -> Tensor:
    """Rows number `at` [n] of a cache whose sequence has `blocks`, tokens or entries, f32 [n, d]."""
    size, every = cache.layout.block_size, every_of(cache)
    last = every * (at + 1) - 1
    block = blocks.long()[last // size]
    if isinstance(cache, AutogradCache):
        place, keys, _ = cache.rows()
        return keys[place[block * size + last % size]]
    found: Tensor = cache.keys[block, last % size // every]
    return found.float()


def store(cache: KVCache, slots: Tensor, rows: Tensor) -> None:
    """Store `rows` [n, d], of which each, or the last token that it stands for, has its slot of `slots` [n] int64."""
    if isinstance(cache, AutogradCache):
        cache.put(slots, rows, rows[:, :0])
        return
    size = cache.layout.block_size
    cache.keys[slots // size, slots % size // every_of(cache)] = rows.to(torch_dtype(cache.layout.dtype))


@op(tolerance=2e-5)
def pool_entries(
    x: Tensor, slots: Tensor, rows: KVCache, entries: KVCache, paged: Paged, tables: Tensor, pool: Pool
) -> Tensor:
    """Store rows and make the entries whose last tokens these are; returns x.

    x [T, 2 * series * d] f32: numbers of `series` parts, and gates of as many, stored in `rows` at `slots` [T] int64,
    as the cache rounds them. Of the row at position p with (p + 1) % every = 0 the entry is the sum over the last
    `every` tokens of softmax(gate + bias) * number, each of the d by itself, of their last part, and where `series` is
    2 over the `every` tokens before these, too, of their first. It is normed, its first numbers are turned by the
    position p + 1 - every, and it is stored in `entries`. `paged`: cu_q, context, block_tables, as in `attention`;
    `tables` are those of the entries.
    """
    (cu_q, context, block_tables), d = paged, index_dim(entries)
    store(rows, slots, x)
    every, wide, held = pool.every, pool.series * d, entries.layout.block_size
    for s, length in enumerate(context.tolist()):
        for position in range(length - int(cu_q[s + 1]) + int(cu_q[s]), length):
            if (position + 1) % every:
                continue
            seen = rows_at(rows, block_tables[s], torch.arange(position + 1 - every, position + 1))
            numbers, gates = seen[:, wide - d : wide], (seen[:, wide:] + pool.bias)[:, wide - d :]
            if pool.series == 2 and position >= every:
                last = rows_at(rows, block_tables[s], torch.arange(position + 1 - 2 * every, position + 1 - every))
                numbers = torch.cat((last[:, :d], numbers))
                gates = torch.cat((last[:, wide : wide + d] + pool.bias[:, :d], gates))
            made = rmsnorm((gates.softmax(0) * numbers).sum(0, keepdim=True), pool.norm, pool.eps)
            made = rotated(made[:, None], torch.tensor([position + 1 - every]), pool.table)[:, 0]
            store(entries, tables[s, position // held].long()[None] * held + position % held, made)
    return x


@op(tolerance=2e-2)
def entry_attention(
    q: Tensor, cache: KVCache, entries: KVCache | None, paged: Paged, tables: Tensor, reads: EntryReads
) -> Tensor:
    """softmax(reads.scale * q . k) k over the entries before a row and the last tokens up to it: f32 [T, heads * d].

    q [T, heads * d] f32. A row at position p reads the tokens from p - reads.window + 1 on, whose keys are their values
    too, and the first (p + 1) // every of `entries`, or of these those that reads.chosen names, None where there are
    none. `reads.sinks` take part in the softmax and have no value. `paged` and `tables` as in `pool_entries`.
    """
    (cu_q, context, block_tables), d = paged, index_dim(cache)
    found = [q.new_zeros(0, q.shape[1])]
    for s, length in enumerate(context.tolist()):
        begin, end = int(cu_q[s]), int(cu_q[s + 1])
        for row in range(begin, end):
            position = length - end + row
            keys = rows_at(cache, block_tables[s], torch.arange(max(0, position + 1 - reads.window), position + 1))
            if entries is not None:
                count = (position + 1) // every_of(entries)
                at = torch.arange(count) if reads.chosen is None else reads.chosen[row][:count].long()
                keys = torch.cat((rows_at(entries, tables[s], at), keys))
            scores = q[row].view(-1, d) @ keys.T * reads.scale
            if reads.sinks is not None:
                scores = torch.cat((scores, reads.sinks[:, None]), 1)
            found.append((scores.softmax(-1)[:, : len(keys)] @ keys).view(1, -1))
    return torch.cat(found)
