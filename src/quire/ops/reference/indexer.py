"""Ops of indexers, which choose the tokens (DeepSeek-AI 2025), or blocks of tokens (MiniMax M3), that rows read."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.core.dtypes import BF16
from quire.ops.autograd_cache import AutogradCache
from quire.ops.entries import every_of
from quire.ops.indexer import BlockIndexer, Choice, PooledIndexer, index_dim
from quire.ops.layout import KVCache
from quire.ops.lazy import torch_dtype
from quire.ops.op import op
from quire.ops.reference.layers import rotated


@op(tolerance=2e-5, into="q")
def index_rope_and_cache(
    q: Tensor, k: Tensor, positions: Tensor, table: Tensor, slots: Tensor, cache: KVCache, heads: int
) -> Tensor:
    """Rotate the first r numbers of each head of q in place, and those of k, which is stored so; returns q.

    q [T, heads * d] f32; k [T, d] f32. `table` [max_positions, 2, r / 2] f32: cosines and sines;
    `positions` [T] int32, `slots` [T] int64.
    """
    d = index_dim(cache)
    _put(cache, slots, rotated(k[:, None], positions, table)[:, 0])
    return rotated(q.view(len(q), heads, d), positions, table).flatten(1)


@op(tolerance=0.0)
def choose_tokens(
    q: Tensor, weights: Tensor, cache: KVCache, cu_q: Tensor, context: Tensor, block_tables: Tensor, choice: Choice
) -> Tensor:
    """Positions of the `choice.most` tokens with the highest scores of those up to each row's own: int32 [T, most].

    A token's score is the sum over heads h of weights[h] * max(0, q_h . k), with its key k: q [T, heads * d] f32,
    weights [T, heads] f32. Of equal scores the earlier token counts more. Positions ascend; a row that sees no more
    than `most` tokens has all of them, and -1 behind these. The batch is as in `attention`. Of a cache of entries
    (`quire.ops.entries`) those up to a row are chosen. What is returned is given up when the op is called again.

    Of `choice.pool` > 1 pools of so many tokens are scored and chosen in place of tokens, by the first d numbers that
    the cache has of their last tokens (`pool_keys`). A row's positions are all of those pools, and of the tokens behind
    the last pool that is whole up to its own: int32 [T, most * pool + pool - 1].
    """
    size, heads, pool, every = cache.layout.block_size, weights.shape[1], choice.pool, every_of(cache)
    queries = q.detach().view(len(q), heads, q.shape[1] // heads)
    d = queries.shape[2]
    if cache.layout.dtype == BF16:
        queries = queries.bfloat16().float()
    out = torch.full((len(q), choice.width), -1, dtype=torch.int32)
    for s in range(len(context)):
        begin, end, length = int(cu_q[s]), int(cu_q[s + 1]), int(context[s])
        if begin == end:
            continue
        slots = (block_tables[s, : -(-length // size)].long()[:, None] * size + torch.arange(size)).flatten()
        own = _keys(cache, slots[:length][pool * every - 1 :: pool * every])[:, :d].float()
        found = torch.einsum("thd,sd->hts", queries[begin:end], own).clamp(min=0)
        scores = torch.einsum("hts,th->ts", found, weights[begin:end].detach())
        for row in range(begin, end):
            seen = (length - end + row + 1) // every
            whole = scores[row - begin, : seen // pool]
            best = whole.sort(descending=True, stable=True).indices[: choice.most].sort().values
            tokens = (best[:, None] * pool + torch.arange(pool)).flatten()
            tokens = torch.cat((tokens, torch.arange(seen // pool * pool, seen)))
            out[row, : len(tokens)] = tokens.int()
    return out


@op(tolerance=2e-5)
def pool_keys(
    k: Tensor, gates: Tensor, bias: Tensor, slots: Tensor, cache: KVCache, paged: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Store keys k and gates [T, d] f32 side by side, and keys of pools of len(bias) tokens where rows have their last.

    A pool's key is the mean of its tokens' keys, each number by itself, by the softmax over tokens of gate + bias; bias
    [pool, d] f32. It lies in the place of the key of the pool's last token, which nothing else reads. What earlier
    steps stored is read as the cache has it. `slots` [T] int64; `paged`: cu_q, context and block_tables, as in
    `attention`.
    """
    cu_q, context, block_tables = paged
    size, (pool, d) = cache.layout.block_size, bias.shape
    _put(cache, slots, torch.cat((k, gates), 1))
    for s in range(len(context)):
        rows, length = int(cu_q[s + 1]) - int(cu_q[s]), int(context[s])
        pools = torch.arange((length - rows) // pool, length // pool)
        if not rows or not len(pools):
            continue
        positions = pools[:, None] * pool + torch.arange(pool)
        places = block_tables[s].long()[positions // size] * size + positions % size
        held = _keys(cache, places.flatten()).float().view(len(pools), pool, 2 * d)
        own, gate = held.chunk(2, 2)
        made = ((gate + bias.detach()).softmax(1) * own).sum(1)
        _put(cache, places[:, -1], torch.cat((made, gate[:, -1]), 1))


@op(tolerance=0.0)
def choose_blocks(
    q: Tensor, cache: KVCache, cu_q: Tensor, context: Tensor, block_tables: Tensor, sizes: BlockIndexer
) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of the cache that each row reads for each head of keys and values, as batches of sequences of one row.

    A block of `sizes.size` tokens scores as its best token up to the row's own does, q . k with the token's key k:
    q [T, heads * d] f32. A row reads the last `sizes.local` blocks up to its own, and of the others those with the
    highest scores, `sizes.most` in all; of equal scores the earlier block counts more. The batch is as in `attention`.

    Returns for each head T tables of blocks of the cache, ascending, int32 [heads * T, n], -1 behind them; how many
    tokens these hold up to the row's own, int32 [heads, T]; and the `cu_q` of T rows, int32 [T + 1]. Over these
    `attention` reads what was chosen, since a row's own block is its last.
    """
    d, held = index_dim(cache), cache.layout.block_size
    heads, per = q.shape[1] // d, sizes.size // held
    queries = q.detach().view(len(q), heads, d)
    if cache.layout.dtype == BF16:
        queries = queries.bfloat16().float()
    tables = torch.full((heads, len(q), sizes.most * per), -1, dtype=torch.int32)
    contexts = torch.zeros((heads, len(q)), dtype=torch.int32)
    for s in range(len(context)):
        begin, end, length = int(cu_q[s]), int(cu_q[s + 1]), int(context[s])
        if begin == end:
            continue
        blocks = block_tables[s, : -(-length // held)]
        keys = _keys(cache, (blocks.long()[:, None] * held + torch.arange(held)).flatten())[:length].float()
        scores = torch.einsum("thd,sd->hts", queries[begin:end], keys)
        for row in range(begin, end):
            seen = length - end + row + 1
            count = -(-seen // sizes.size)
            own = scores.new_full((heads, count * sizes.size), -torch.inf)
            own[:, :seen] = scores[:, row - begin, :seen]
            best = own.view(heads, count, sizes.size).amax(-1)
            best[:, max(0, count - sizes.local) :] = torch.inf
            chosen = best.sort(descending=True, stable=True).indices[:, : sizes.most].sort().values
            for head, ids in enumerate(chosen):
                places = (ids[:, None] * per + torch.arange(per)).flatten()
                places = places[places < -(-seen // held)]
                tables[head, row, : len(places)] = blocks[places]
                contexts[head, row] = (len(ids) - 1) * sizes.size + (seen - 1) % sizes.size + 1
    return tables.flatten(0, 1), contexts, torch.arange(len(q) + 1, dtype=torch.int32)


@op(tolerance=0.0)
def choose_pooled(
    q: Tensor, cache: KVCache, cu_q: Tensor, context: Tensor, block_tables: Tensor, sizes: PooledIndexer
) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of the cache that each row reads, as a batch of sequences of one row.

    The key k of a block of `sizes.size` tokens is that of its last token; it scores by the sum over heads h of
    max(0, q_h . k): q [T, heads * d] f32. Of the whole blocks up to its own token a row reads the `sizes.most` with the
    highest scores, and all tokens behind them; of equal scores the earlier block counts more. The batch is as in
    `attention`.

    Returns T tables of blocks of the cache, ascending, int32 [T, n], -1 behind them; how many tokens these hold up to
    the row's own, int32 [T]; and the `cu_q` of T rows, int32 [T + 1].
    """
    d, held = index_dim(cache), cache.layout.block_size
    heads, per = q.shape[1] // d, sizes.size // held
    queries = q.detach().view(len(q), heads, d)
    if cache.layout.dtype == BF16:
        queries = queries.bfloat16().float()
    tables = torch.full((len(q), (sizes.most + 1) * per), -1, dtype=torch.int32)
    contexts = torch.zeros(len(q), dtype=torch.int32)
    for s in range(len(context)):
        begin, end, length = int(cu_q[s]), int(cu_q[s + 1]), int(context[s])
        if begin == end:
            continue
        blocks, last = block_tables[s].long(), torch.arange(1, length // sizes.size + 1) * sizes.size - 1
        keys = _keys(cache, blocks[last // held] * held + last % held).float()
        scores = torch.einsum("thd,sd->hts", queries[begin:end], keys).clamp(min=0).sum(0)
        for row in range(begin, end):
            seen = length - end + row + 1
            count, rest = divmod(seen, sizes.size)
            best = scores[row - begin, :count].sort(descending=True, stable=True).indices[: sizes.most].sort().values
            places = (best[:, None] * per + torch.arange(per)).flatten()
            places = torch.cat((places, count * per + torch.arange(-(-rest // held))))
            tables[row, : len(places)] = blocks[places].int()
            contexts[row] = len(best) * sizes.size + rest
    return tables, contexts, torch.arange(len(q) + 1, dtype=torch.int32)


def _put(cache: KVCache, slots: Tensor, keys: Tensor) -> None:
    """Store keys [t, n] in `slots` [t]."""
    if isinstance(cache, AutogradCache):
        cache.put(slots, keys, keys[:, :0])
    else:
        size = cache.layout.block_size
        cache.keys[slots // size, slots % size] = keys.to(torch_dtype(cache.layout.dtype))


def _keys(cache: KVCache, slots: Tensor) -> Tensor:
    """The keys in `slots` [n]."""
    if isinstance(cache, AutogradCache):
        place, keys, _ = cache.rows()
        return keys.detach()[place[slots[slots < len(place)]]]
    size = cache.layout.block_size
    held: Tensor = cache.keys[slots // size, slots % size // every_of(cache)]
    return held
