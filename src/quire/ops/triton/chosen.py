"""The launches of attention to the latents of chosen tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from quire.ops.latents import LatentReads
from quire.ops.layout import KVCache
from quire.ops.triton import attention_kernels, chosen_kernels
from quire.ops.triton.checks import tensor
from quire.ops.triton.gpu import Gpu

MOST_PARTS = 256 << 20
"""Bytes of parts that lie in memory at a time: rows of longer batches are computed one part after another."""


def attend_chosen(
    gpu: Gpu,
    queries: tuple[Tensor, Tensor],
    cache: KVCache,
    batch: tuple[Tensor, Tensor, Tensor],
    reads: LatentReads,
    static: dict[str, Any],
    sizes: dict[str, int],
) -> Tensor:
    """Latents [T, heads * rank] and rows whose heads end in rotated numbers, to the tokens `reads.chosen`.

    `batch`: cu_q, context, block tables; `static`: the constants of attention to all tokens, whose splits these are.
    """
    latent, rotated = queries
    cu_q, context, tables = batch
    rows, d, split = len(latent), static["D"], static["SPLIT"]
    heads = latent.shape[1] // d
    assert reads.chosen is not None, "what is asked for"
    chosen, factor = reads.chosen, reads.scale * attention_kernels.LOG2E.value
    most = tensor(chosen, "latent_attention chosen", torch.int32, rows, -1).shape[1]
    out, counts = gpu.empty(rows, heads * d, dtype=latent.dtype), gpu.empty(rows, dtype=torch.int32)
    ends = torch.arange(rows + 1, dtype=torch.int32, device=gpu.device)
    splits = max(1, triton.cdiv(min(most, tables.shape[1] * cache.layout.block_size), split))
    together = max(1, min(rows, MOST_PARTS // (heads * splits * (d + 2) * 4)))
    acc, ml = gpu.empty(together, heads, splits, d), gpu.empty(together, heads, splits, 2)
    tiles = triton.cdiv(heads, sizes["rows"])
    own = {name: static[name] for name in ("D", "BD", "SIZE", "BN", "R", "SPLIT", "DOT")}
    for first in range(0, rows, together):
        part = slice(first, min(first + together, rows))
        count = part.stop - first
        chosen_kernels.chosen_kernel[(count, tiles, splits)](
            acc, ml, counts[part], latent, rotated, cache.keys, cache.values, cu_q, context, tables, chosen, factor,
            first, len(context), splits, latent.stride(0), rotated.stride(0), rotated.shape[1] // heads,
            tables.stride(0), cache.keys.stride(0), cache.values.stride(0), heads, most, BM=sizes["rows"],
            TILE_HEADS=triton.cdiv(heads, tiles), POOL=reads.pool, **own,
            num_warps=sizes["warps"], num_stages=sizes["stages"],
        )  # fmt: skip
        merged = sizes["merged_heads"]
        attention_kernels.merge_kernel[(count, triton.cdiv(heads, merged))](
            out[part], acc, ml, ends, counts[part], reads.sinks, None, 0, heads, splits, D=d, BD=static["BD"],
            BH=merged, SPLIT=split, SPEC=static["SPEC"], SINGLE=False, num_warps=sizes["merge_warps"],
        )  # fmt: skip
    return out
