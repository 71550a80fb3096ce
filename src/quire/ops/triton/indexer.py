"""The GPU backend's side of the ops of indexers, which choose what rows read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from quire.ops.indexer import BlockIndexer, Choice, PooledIndexer, index_dim, key_dim
from quire.ops.layout import KVCache
from quire.ops.lazy import torch_dtype
from quire.ops.op import impl
from quire.ops.triton import indexer_kernels as kernels
from quire.ops.triton import pooled_kernels as pooled
from quire.ops.triton import pooled_key_kernels as pooled_keys
from quire.ops.triton.attention import DOTS
from quire.ops.triton.cache import heads_together, pairs_of
from quire.ops.triton.checks import activations, tensor
from quire.ops.triton.gpu import Gpu

F32, I32, I64 = torch.float32, torch.int32, torch.int64
MOST_SCORES = 256 << 20
"""Bytes of scores that lie in memory at a time: rows of longer batches are scored and picked one part after another."""


@impl("index_rope_and_cache", "triton")
def index_rope_and_cache(
    gpu: Gpu, q: Tensor, k: Tensor, positions: Tensor, table: Tensor, slots: Tensor, cache: KVCache, heads: int
) -> Tensor:
    d = _checked(cache)
    rows, _ = activations(q, "index_rope_and_cache q", -1, heads * d)
    activations(k, "index_rope_and_cache k", rows, d)
    tensor(positions, "index_rope_and_cache positions", I32, rows)
    tensor(slots, "index_rope_and_cache slots", I64, rows)
    if rows:
        tile = heads_together(gpu, heads)
        kernels.index_rope_kernel[(rows, cdiv(heads, tile) + 1)](
            q, k, positions, table, slots, cache.keys, cache.keys.stride(0), HEADS=heads, SIZE=cache.layout.block_size,
            BH=tile, **pairs_of(table, d, "index_rope_and_cache"),
        )  # fmt: skip
    return q


@impl("choose_tokens", "triton")
def choose_tokens(
    gpu: Gpu,
    q: Tensor,
    weights: Tensor,
    cache: KVCache,
    cu_q: Tensor,
    context: Tensor,
    block_tables: Tensor,
    choice: Choice,
) -> Tensor:
    held, d, pool = _checked(cache), key_dim(cache, choice), choice.pool
    rows, heads = activations(weights, "choose_tokens weights")
    activations(q, "choose_tokens q", rows, heads * d)
    sequences = _batch("choose_tokens", cu_q, context, block_tables)
    span = max(1, block_tables.shape[1] * cache.layout.block_size // pool)
    out = gpu.empty(rows, choice.width, dtype=I32)
    sizes, together = _sizes(gpu, cache, heads), rows_at_once(rows, span)
    scores = gpu.empty(together, span)
    static = _static(cache, heads) | {"D": d, "BD": max(16, next_power_of_2(d)), "STEP": held, "POOL": pool}
    for first in range(0, rows, together):
        count, parts = min(together, rows - first), _parts(gpu, rows, cdiv(span, sizes["keys"]))
        kernels.token_scores_kernel[(count, parts)](
            scores, q, weights, cache.keys, cu_q, context, block_tables, first, sequences, parts, choice.most, span,
            block_tables.stride(0), cache.keys.stride(0), BN=sizes["keys"], **static,
            num_warps=sizes["warps"], num_stages=sizes["stages"],
        )  # fmt: skip
        kernels.pick_tokens_kernel[(count,)](
            out, scores, cu_q, context, first, sequences, choice.most, span, POOL=pool, BP=next_power_of_2(pool),
            BLOCK=max(16, sizes["block"] // next_power_of_2(pool)),
        )  # fmt: skip
    return out


@impl("pool_keys", "triton")
def pool_keys(
    gpu: Gpu, k: Tensor, gates: Tensor, bias: Tensor, slots: Tensor, cache: KVCache, paged: tuple[Tensor, ...]
) -> None:
    held, (pool, d) = _checked(cache), tensor(bias, "pool_keys bias", F32, -1, -1).shape
    rows, _ = activations(k, "pool_keys k", -1, d)
    activations(gates, "pool_keys gates", rows, d)
    tensor(slots, "pool_keys slots", I64, rows)
    if held != 2 * d:
        raise ValueError(f"pool_keys: the cache has {held} numbers of a token, not {d} of a key and {d} of its gates")
    cu_q, context, block_tables = paged
    sequences = _batch("pool_keys", cu_q, context, block_tables)
    if rows:
        size, step = cache.layout.block_size, cache.keys.stride(0)
        pooled_keys.store_kernel[(rows,)](k, gates, slots, cache.keys, step, D=d, BD=next_power_of_2(d), SIZE=size)
        pooled_keys.pool_kernel[(rows,)](
            bias, cache.keys, cu_q, context, block_tables, sequences, block_tables.stride(0), step, D=d,
            BD=next_power_of_2(d), SIZE=size, POOL=pool, BP=next_power_of_2(pool),
        )  # fmt: skip


@impl("choose_blocks", "triton")
def choose_blocks(
    gpu: Gpu, q: Tensor, cache: KVCache, cu_q: Tensor, context: Tensor, block_tables: Tensor, sizes: BlockIndexer
) -> tuple[Tensor, Tensor, Tensor]:
    d, held = _checked(cache), cache.layout.block_size
    rows, width = activations(q, "choose_blocks q")
    heads, per = width // d, sizes.size // held
    if width % d or sizes.size % held:
        raise ValueError(f"choose_blocks: {width} columns, {sizes.size} tokens are not heads of {d}, blocks of {held}")
    sequences = _batch("choose_blocks", cu_q, context, block_tables)
    tables, contexts = gpu.empty(heads * rows, sizes.most * per, dtype=I32), gpu.empty(heads, rows, dtype=I32)
    span, tuned = cdiv(block_tables.shape[1], per), _sizes(gpu, cache, heads)
    together = rows_at_once(rows, heads * span)
    scores = gpu.empty(together, heads, span)
    for first in range(0, rows, together):
        count, parts = min(together, rows - first), _parts(gpu, rows, span)
        kernels.block_scores_kernel[(count, parts)](
            scores, q, cache.keys, cu_q, context, block_tables, first, sequences, parts, sizes.most, sizes.local, span,
            block_tables.stride(0), cache.keys.stride(0), WIDTH=sizes.size,
            BN=max(16, min(tuned["keys"], next_power_of_2(sizes.size))), **_static(cache, heads),
            num_warps=tuned["warps"], num_stages=tuned["stages"],
        )  # fmt: skip
        kernels.pick_blocks_kernel[(count, heads)](
            tables, contexts, scores, cu_q, context, block_tables, first, sequences, rows, sizes.most, span,
            block_tables.stride(0), HEADS=heads, SIZE=held, WIDTH=sizes.size, PER=per, BP=next_power_of_2(per),
            BLOCK=max(16, tuned["block"] // next_power_of_2(per)),
        )  # fmt: skip
    return tables, contexts, torch.arange(rows + 1, dtype=I32, device=gpu.device)


@impl("choose_pooled", "triton")
def choose_pooled(
    gpu: Gpu, q: Tensor, cache: KVCache, cu_q: Tensor, context: Tensor, block_tables: Tensor, sizes: PooledIndexer
) -> tuple[Tensor, Tensor, Tensor]:
    d, held = _checked(cache), cache.layout.block_size
    rows, width = activations(q, "choose_pooled q")
    heads, per = width // d, sizes.size // held
    if width % d or sizes.size % held:
        raise ValueError(f"choose_pooled: {width} columns, {sizes.size} tokens are not heads of {d}, blocks of {held}")
    sequences = _batch("choose_pooled", cu_q, context, block_tables)
    tables, contexts = gpu.empty(rows, (sizes.most + 1) * per, dtype=I32), gpu.empty(rows, dtype=I32)
    span, tuned = cdiv(block_tables.shape[1], per), _sizes(gpu, cache, heads)
    together = rows_at_once(rows, span)
    scores = gpu.empty(together, span)
    for first in range(0, rows, together):
        count, parts = min(together, rows - first), _parts(gpu, rows, cdiv(span, tuned["keys"]))
        pooled.pooled_scores_kernel[(count, parts)](
            scores, q, cache.keys, cu_q, context, block_tables, first, sequences, parts, sizes.most, span,
            block_tables.stride(0), cache.keys.stride(0), WIDTH=sizes.size, BN=tuned["keys"], **_static(cache, heads),
            num_warps=tuned["warps"], num_stages=tuned["stages"],
        )  # fmt: skip
        pooled.pick_pooled_kernel[(count,)](
            tables, contexts, scores, cu_q, context, block_tables, first, sequences, sizes.most, span,
            block_tables.stride(0), SIZE=held, WIDTH=sizes.size, PER=per, BP=next_power_of_2(per),
            BLOCK=max(16, tuned["block"] // next_power_of_2(per)),
        )  # fmt: skip
    return tables, contexts, torch.arange(rows + 1, dtype=I32, device=gpu.device)


def rows_at_once(rows: int, scores: int) -> int:
    """Rows of `scores` scores each that are computed together, at least one."""
    return max(1, min(rows, MOST_SCORES // max(1, 4 * scores)))


def _checked(cache: KVCache) -> int:
    """Numbers of a key of a cache of index keys in a type that is multiplied."""
    d, layout = index_dim(cache), cache.layout
    if layout.dtype not in DOTS:
        raise ValueError(f"index cache: keys are not kept as {layout.dtype}")
    tensor(cache.keys[0], "block of index keys", torch_dtype(layout.element), *layout.shapes(1)[0][1:])
    return d


def _batch(what: str, cu_q: Tensor, context: Tensor, tables: Tensor) -> int:
    """Sequences of a batch."""
    sequences = len(tensor(context, f"{what} context", I32, -1))
    tensor(cu_q, f"{what} cu_q", I32, sequences + 1)
    tensor(tables, f"{what} block_tables", I32, sequences, -1)
    return sequences


def _sizes(gpu: Gpu, cache: KVCache, heads: int) -> dict[str, int]:
    return gpu.config("indexer", heads=heads, bytes=DOTS[cache.layout.dtype].primitive_bitwidth // 8)


def _static(cache: KVCache, heads: int) -> dict[str, Any]:
    layout = cache.layout
    return {
        "HEADS": heads,
        "BH": max(16, next_power_of_2(heads)),
        "D": layout.head_dim,
        "BD": max(16, next_power_of_2(layout.head_dim)),
        "SIZE": layout.block_size,
        "DOT": DOTS[layout.dtype],
    }


def _parts(gpu: Gpu, rows: int, tiles: int) -> int:
    """Programs of a row, so that few rows fill the device."""
    return max(1, min(tiles, int(cdiv(4 * gpu.chip.processors, rows))))
