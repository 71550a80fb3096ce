"""Keys and values of torch caches in their logical order, read and written, as the ops' definitions do.

What is written into a cache that is `AutogradCache` stays in autograd's graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.core.dtypes import I8, Dtype
from quire.ops.autograd_cache import AutogradCache
from quire.ops.layout import LARGEST, KVCache, KVLayout
from quire.ops.lazy import torch_dtype

TINY = 1e-36
"""Below it the inverse of a scale overflows."""


def allocate(layout: KVLayout, blocks: int) -> KVCache:
    """Zeroed keys and values of `blocks` blocks, on torch's default device."""
    keys, values = (torch.zeros(shape, dtype=torch_dtype(layout.element)) for shape in layout.shapes(blocks))
    return KVCache(layout, keys, values)


def key_codes(layout: KVLayout, keys: Tensor) -> Tensor:
    """View of a key cache as [blocks, kv_heads, block_size / lanes, head_dim / pair, lanes, pair]."""
    return _codes(layout, keys).view(*keys.shape[:2], *layout.key_shape) if layout.scaled else keys


def value_codes(layout: KVLayout, values: Tensor) -> Tensor:
    """View of a value cache as [blocks, kv_heads, block_size / vpair, head_dim, vpair]."""
    return _codes(layout, values).view(*values.shape[:2], *layout.value_shape) if layout.scaled else values


def scales(layout: KVLayout, cache: Tensor) -> Tensor:
    """View of the scales of a scaled cache, f32 [blocks, kv_heads, block_size]."""
    return cache[..., layout.block_size * layout.head_dim :].view(torch.float32)


def _codes(layout: KVLayout, cache: Tensor) -> Tensor:
    return cache[..., : layout.block_size * layout.head_dim].view(torch_dtype(layout.dtype))


def logical(cache: KVCache, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """What `blocks` (int64 [n]) hold: keys and values f32, each [n, kv_heads, block_size, head_dim]."""
    at, keys, values = cache.layout, cache.keys[blocks], cache.values[blocks]
    shape = (-1, at.kv_heads, at.block_size, at.head_dim)
    k = key_codes(at, keys).float().permute(0, 1, 2, 4, 3, 5).reshape(shape)
    v = value_codes(at, values).float().permute(0, 1, 2, 4, 3).reshape(shape)
    if at.scaled:
        k = k * scales(at, keys)[..., None]
        v = v * scales(at, values)[..., None]
    return k, v


def write(cache: KVCache, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k, v [t, kv_heads, head_dim] at `slots` [t] int64 (slot = block * block_size + offset; -1: not)."""
    if isinstance(cache, AutogradCache):
        cache.put(slots, k, v)
        return
    at, kept = cache.layout, slots >= 0
    keys: Tensor = cache.keys
    values: Tensor = cache.values
    slots, k, v = slots[kept], k[kept], v[kept]
    block, offset = slots // at.block_size, slots % at.block_size
    if at.scaled:
        k, scales(at, keys)[block, :, offset] = quantize_rows(k, at.dtype)
        v, scales(at, values)[block, :, offset] = quantize_rows(v, at.dtype)
    dtype = torch_dtype(at.dtype)
    shaped = k.to(dtype).view(*k.shape[:2], at.head_dim // at.pair, at.pair)
    key_codes(at, keys)[block, :, offset // at.lanes, :, offset % at.lanes] = shaped
    value_codes(at, values)[block, :, offset // at.vpair, :, offset % at.vpair] = v.to(dtype)


def write_latents(cache: KVCache, slots: Tensor, keys: Tensor, latents: Tensor) -> None:
    """Store rotated keys [t, head_dim] and latents [t, rank] at `slots` [t] int64."""
    if isinstance(cache, AutogradCache):
        cache.put(slots, keys, latents)
        return
    size, dtype = cache.layout.block_size, torch_dtype(cache.layout.dtype)
    cache.keys[slots // size, slots % size] = keys.to(dtype)
    cache.values[slots // size, slots % size] = latents.to(dtype)


def quantize_rows(x: Tensor, dtype: Dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of a scaled cache: x [..., d] f32 is about codes [..., d] * scales [...] f32.

    The scale is max|x| / LARGEST[dtype], codes are x * (LARGEST[dtype] / max|x|) rounded to the nearest, ties to even.
    A row with max|x| below TINY has codes 0; one with an inf or NaN has scale NaN, which its readers see.
    """
    largest = LARGEST[dtype]
    most = x.abs().amax(-1, keepdim=True)
    finite = most.isfinite()
    inverse = torch.where(finite & (most > TINY), largest / most, 0.0)
    codes = (x * inverse).nan_to_num(0.0)
    found = torch.where(finite, most / largest, torch.nan)[..., 0]
    return (codes.round() if dtype == I8 else codes).to(torch_dtype(dtype)), found
