"""Keys of indexers that are of pools of tokens on the GPU: means of the tokens' keys, gated (GLM-5.3-Flash).

A pool's key is computed by one program, from what the cache has of its tokens, in the order of these.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.indexer_kernels import seen_by
from quire.ops.triton.interpreter import repair

repair()


@triton.jit
def store_kernel(k, gates, slots, keys, block_step, D: tl.constexpr, BD: tl.constexpr, SIZE: tl.constexpr):
    """Keys and gates of rows side by side; nothing at a negative slot. Grid: (rows)."""
    t, d = tl.program_id(0).to(tl.int64), tl.arange(0, BD)
    slot = tl.load(slots + t)
    inside = (d < D) & (slot >= 0)
    to = keys + slot // SIZE * block_step + slot % SIZE * (2 * D) + d
    tl.store(to, tl.load(k + t * D + d, mask=inside, other=0.0), mask=inside)
    tl.store(to + D, tl.load(gates + t * D + d, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["sequences"])
def pool_kernel(bias, keys, cu_q, context, tables, sequences, table_step, block_step, D: tl.constexpr,
                BD: tl.constexpr, SIZE: tl.constexpr, POOL: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """The key of each pool whose last token a row has, in the place of that token's. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    s, seen = seen_by(row, cu_q, context, sequences)
    if (seen > 0) & (seen % POOL == 0):
        j, d = tl.arange(0, BP), tl.arange(0, BD)
        real = (j < POOL)[:, None] & (d < D)[None, :]
        token = seen - POOL + j
        block = tl.load(tables + s.to(tl.int64) * table_step + token // SIZE, mask=j < POOL, other=0).to(tl.int64)
        at = keys + (block * block_step + token % SIZE * (2 * D))[:, None] + d[None, :]
        gate = tl.load(at + D, mask=real, other=0.0).to(tl.float32)
        gate = gate + tl.load(bias + j[:, None] * D + d[None, :], mask=real, other=0.0)
        gate = tl.where(real, gate, float("-inf"))
        weight = tl.exp(gate - tl.where((d < D)[None, :], tl.max(gate, 0)[None, :], 0.0))
        made = tl.sum(weight * tl.load(at, mask=real, other=0.0).to(tl.float32), 0)
        made = made / tl.where(d < D, tl.sum(weight, 0), 1.0)
        tl.debug_barrier()
        tl.store(at, tl.broadcast_to(made[None, :], (BP, BD)), mask=real & (j == POOL - 1)[:, None])
