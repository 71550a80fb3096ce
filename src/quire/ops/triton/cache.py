"""The GPU backend's side of the ops that write the caches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from quire.core.dtypes import I8
from quire.ops.latents import LatentHeads, rank_of
from quire.ops.layout import LARGEST, KVCache, KVLayout
from quire.ops.op import impl
from quire.ops.triton import cache_kernels as kernels
from quire.ops.triton.attention import query_heads
from quire.ops.triton.checks import activations, check_cache, scales_of, tensor
from quire.ops.triton.gpu import Gpu

F32, I32, I64 = torch.float32, torch.int32, torch.int64


@impl("rope_and_cache", "triton")
def rope_and_cache(
    gpu: Gpu,
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    slots: Tensor,
    cache: KVCache,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    rows, width = activations(qkv, "rope_and_cache qkv")
    layout = cache.layout
    d, kv_heads = layout.head_dim, layout.kv_heads
    heads = query_heads(width, kv_heads, d)
    tensor(positions, "rope_and_cache positions", I32, rows)
    tensor(slots, "rope_and_cache slots", I64, rows)
    check_cache(cache)
    for norm in norms or ():
        tensor(norm, "rope_and_cache norm", F32, d)
    if rows:
        together = heads_together(gpu, heads)
        kernels.rope_kernel[(rows, cdiv(heads, together) + cdiv(kv_heads, together))](
            qkv, positions, table, slots, cache.keys, cache.values, *scales_of(cache), *(norms or (None, None)), eps,
            LARGEST.get(layout.dtype, 0.0), cache.keys.stride(0), cache.keys.stride(1), HEADS=heads, KV=kv_heads,
            SIZE=layout.block_size, BH=together, KIND=_kind(layout).value, **pairs_of(table, d, "rope_and_cache"),
        )  # fmt: skip
    return qkv


@impl("rope_queries", "triton")
def rope_queries(
    gpu: Gpu, q: Tensor, positions: Tensor, table: Tensor, pad: int, head_dim: int, norm: Tensor | None, eps: float
) -> Tensor:
    rows, width = activations(q, "rope_queries q")
    tensor(positions, "rope_queries positions", I32, rows)
    if width % head_dim:
        raise ValueError(f"rope_queries: {width} columns are not heads of {head_dim}")
    if norm is not None:
        tensor(norm, "rope_queries norm", F32, head_dim)
    out = torch.zeros(rows, width + pad * head_dim, dtype=q.dtype, device=q.device)
    if rows:
        heads = width // head_dim
        together = heads_together(gpu, heads)
        kernels.queries_kernel[(rows, cdiv(heads, together))](
            out, q, positions, table, norm, eps, pad, HEADS=heads, BH=together,
            **pairs_of(table, head_dim, "rope_queries"),
        )  # fmt: skip
    return out


@impl("latent_rope_and_cache", "triton")
def latent_rope_and_cache(
    gpu: Gpu,
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    table: Tensor,
    slots: Tensor,
    cache: KVCache,
    heads: LatentHeads,
) -> Tensor:
    rank, r, size = rank_of(cache), cache.layout.head_dim, cache.layout.block_size
    rows, width = activations(q, "latent_rope_and_cache q")
    check_cache(cache)
    activations(kv, "latent_rope_and_cache kv", rows, rank + r)
    tensor(positions, "latent_rope_and_cache positions", I32, rows)
    tensor(slots, "latent_rope_and_cache slots", I64, rows)
    tensor(table, "latent_rope_and_cache table", F32, -1, 2, r // 2)
    tensor(heads.norm, "latent_rope_and_cache norm", F32, rank)
    if width % heads.count:
        raise ValueError(f"latent_rope_and_cache: {width} columns are not {heads.count} heads")
    if rows:
        together = heads_together(gpu, heads.count)
        kernels.latent_rope_kernel[(rows, cdiv(heads.count, together) + 1)](
            q, kv, positions, table, slots, cache.keys, cache.values, heads.norm, heads.eps, cache.keys.stride(0),
            cache.values.stride(0), heads.count, width // heads.count, R=r, RANK=rank, BRANK=next_power_of_2(rank),
            HB=next_power_of_2(max(r // 2, 1)), SIZE=size, BH=together,
        )  # fmt: skip
    return q


@impl("copy_blocks", "triton")
def copy_blocks(gpu: Gpu, caches: list[KVCache], pairs: tuple[tuple[int, int], ...]) -> None:
    flat = gpu.upload(np.array(pairs, np.int64).reshape(-1, 2))
    for words, addresses in _by_size(gpu, caches) if pairs else ():
        size = gpu.config("rowwise")["block"]
        kernels.copy_kernel[(cdiv(words, size), len(addresses))](addresses, flat, len(pairs), words, BLOCK=size)


@impl("move_slots", "triton")
def move_slots(gpu: Gpu, caches: list[KVCache], pairs: tuple[tuple[int, int], ...]) -> None:
    flat = gpu.upload(np.array(pairs, np.int64).reshape(-1, 2))
    for layout in {cache.layout for cache in caches} if pairs else ():
        row = layout.head_dim * layout.dtype.itemsize // 4
        head = layout.block_size * (row + int(layout.scaled))
        for words, addresses in _by_step(gpu, [cache for cache in caches if cache.layout == layout]):
            kernels.move_kernel[(layout.kv_heads, len(addresses))](
                addresses, flat, len(pairs), words, head, SIZE=layout.block_size, ROW=row,
                SCALED=int(layout.scaled), BLOCK=next_power_of_2(row + 1),
            )  # fmt: skip


@impl("zero_blocks", "triton")
def zero_blocks(gpu: Gpu, caches: list[KVCache], blocks: tuple[int, ...]) -> None:
    flat = gpu.upload(np.array(blocks, np.int64))
    for words, addresses in _by_size(gpu, caches) if blocks else ():
        size = gpu.config("rowwise")["block"]
        kernels.zero_kernel[(len(blocks), len(addresses), cdiv(words, size))](addresses, flat, words, BLOCK=size)


def _kind(layout: KVLayout) -> Any:
    if not layout.scaled:
        return kernels.PLAIN
    return kernels.INT8 if layout.dtype == I8 else kernels.FP8


def pairs_of(table: Tensor, d: int, what: str) -> dict[str, int]:
    """Sizes of the parts of a head, constants of kernels: numbers that turn in pairs, and the rest."""
    half = tensor(table, f"{what} table", F32, -1, 2, -1).shape[2]
    if 2 * half > d:
        raise ValueError(f"{what} table: {2 * half} dimensions do not fit head_dim {d}")
    return {"D": d, "HALF": half, "HB": next_power_of_2(max(half, 1)), "RB": next_power_of_2(max(d - 2 * half, 1))}


def heads_together(gpu: Gpu, heads: int) -> int:
    """Heads of one program."""
    return int(min(next_power_of_2(heads), gpu.config("rowwise")["heads"]))


def _by_size(gpu: Gpu, caches: list[KVCache]) -> list[tuple[int, Tensor]]:
    """(32-bit words of a block, int64 addresses on the device) of the caches' tensors, by the size of their blocks."""
    if not all(t.is_contiguous() for cache in caches for t in cache.arrays):
        raise ValueError("caches whose blocks are copied or wiped must be contiguous")
    return _by_step(gpu, caches)


def _by_step(gpu: Gpu, caches: list[KVCache]) -> list[tuple[int, Tensor]]:
    """Copy blocks by the 32-bit words from one block to the next, between which other layers may have theirs."""
    tensors = [t for cache in caches for t in cache.arrays]
    if any(t.stride(0) * t.element_size() % 4 for t in tensors):
        raise ValueError("blocks of caches must be whole words of 32 bits")
    return _addresses(gpu, tuple((t.stride(0) * t.element_size() // 4, t.data_ptr()) for t in tensors))


@functools.lru_cache(maxsize=8)
def _addresses(gpu: Gpu, where: tuple[tuple[int, int], ...]) -> list[tuple[int, Tensor]]:
    sizes = sorted({words for words, _ in where})
    return [(n, gpu.upload(np.array([at for words, at in where if words == n], np.int64))) for n in sizes]
