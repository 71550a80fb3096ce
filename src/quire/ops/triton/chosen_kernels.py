"""Attention to the latents of chosen tokens on the GPU (DeepSeek-AI 2025).

A row's tokens are walked in the order of its list, in the splits and tiles in which `attention_kernels` walks all
tokens, and with its sums: a row that reads every token gets the bits of a model without an indexer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.attention_kernels import PLAIN, queries_of, rows_of_cache, update
from quire.ops.triton.indexer_kernels import seen_by
from quire.ops.triton.interpreter import repair

repair()


@triton.jit
def tile_of_chosen(first, queries, m, e, acc, kv, chosen, count, factor, D: tl.constexpr, BD: tl.constexpr,
                   SIZE: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """The running softmax (m, e, acc) of rows after entries first..first + BN of the list `chosen` of `count` tokens.

    queries = (latent [BM, BD], rotated [BM, power of two from R on]); kv = (keys, values, the sequence's table,
    elements from one block to the next of keys and of values).
    """
    keys, values, table, key_step, value_step = kv
    at = first + tl.arange(0, BN)
    inside = at < count
    token = tl.load(chosen + at, mask=inside, other=0)
    block = tl.load(table + token // SIZE, mask=inside, other=0).to(tl.int64)
    latent, rotated = queries
    where = block * value_step + token % SIZE * D
    v, scale = rows_of_cache(values, values, where, where, inside, D, BD, DOT, PLAIN, True)
    x = tl.dot(latent, tl.trans(v), input_precision="ieee")
    if R > 0:
        where = block * key_step + token % SIZE * R
        k, _ = rows_of_cache(keys, keys, where, where, inside, R, rotated.shape[1], DOT, PLAIN, True)
        x = tl.dot(rotated, tl.trans(k), x, input_precision="ieee")
    x = tl.where(inside[None, :], x, float("-inf"))
    return update(x, v, scale, m, e, acc, factor, DOT, PLAIN)


@triton.jit(do_not_specialize=["first", "sequences", "splits"])
def chosen_kernel(part_acc, part_ml, counts, latent, rotated, keys, values, cu_q, context, tables, chosen, factor,
                  first, sequences, splits, row_step, rotated_step, rotated_width, table_step, key_step, value_step,
                  heads, most, D: tl.constexpr, BD: tl.constexpr, SIZE: tl.constexpr, TILE_HEADS: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr,
                  POOL: tl.constexpr):  # fmt: skip
    """Softmax and its sum over values of each row and split, and how many tokens each row reads, as `split_kernel` of
    sequences of one row gives them. Grid: (rows from `first` on, tiles of heads, splits)."""
    number, split = tl.program_id(0), tl.program_id(2)
    row = (first + number).to(tl.int64)
    s, seen = seen_by(row, cu_q, context, sequences)
    count = tl.minimum(seen, most // POOL * POOL + seen % POOL)
    if split == 0:
        tl.store(counts + number, count)
    index, d = tl.arange(0, BM), tl.arange(0, BD)
    head = tl.program_id(1) * TILE_HEADS + index
    real = (index < TILE_HEADS) & (head < heads)
    low, high = split * SPLIT, tl.minimum((split + 1) * SPLIT, count)
    if low < high:
        queries = queries_of(latent, rotated, row + tl.zeros([BM], tl.int64), head, real, row_step, rotated_step,
                             rotated_width, D, BD, R, DOT)  # fmt: skip
        kv = (keys, values, tables + s.to(tl.int64) * table_step, key_step, value_step)
        m = tl.full([BM], float("-inf"), tl.float32)
        e = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BD], tl.float32)
        for at in range(low, high, BN):
            m, e, acc = tile_of_chosen(
                at, queries, m, e, acc, kv, chosen + row * most, high, factor, D, BD, SIZE, BN, R, DOT
            )
        out = (number.to(tl.int64) * heads + head) * splits + split
        tl.store(part_ml + out * 2, m, mask=real)
        tl.store(part_ml + out * 2 + 1, e, mask=real)
        tl.store(part_acc + out[:, None] * D + d[None, :], acc, mask=real[:, None] & (d < D)[None, :])
