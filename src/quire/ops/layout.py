"""How keys and values lie in memory: permutations of the logical [blocks, kv_heads, block_size, head_dim].

The CPU layout puts up to 16 tokens of a block into the lanes of a vector register for q.k, and pairs of tokens side by
side for p.v, so that bf16 dot-product instructions read both without a transpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LANES = 16
KV_FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)
"""Numbers of the formats in csrc/units/rope.h."""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The code that the largest number of a scaled row gets."""
SCALE_BYTES = 4
TINY = 1e-36
"""Below it the inverse of a scale overflows."""


@dataclass(frozen=True)
class KVLayout:
    """Layout of one layer's key and value caches.

    keys   [blocks, kv_heads, block_size / lanes, head_dim / pair, lanes, pair]
    values [blocks, kv_heads, block_size / vpair, head_dim, vpair]
    with lanes = min(block_size, 16), vpair = min(pair, block_size), pair = 1 where attention computes in f32 (f32 and
    fp16 caches) and 2 where it computes in bf16 (all others).

    int8 and fp8 (e4m3) caches are scaled: one f32 scale per token and kv head, of the keys and of the values. The cache
    is then bytes, [blocks, kv_heads, block_size * (head_dim + 4)]: the codes of a (block, head) in the order above,
    then its block_size scales, so that whatever moves a block moves its scales.
    """

    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def lanes(self) -> int:
        """Tokens side by side in the key layout."""
        return min(self.block_size, LANES)

    @property
    def pair(self) -> int:
        """Consecutive head dimensions side by side in the key layout."""
        return 1 if self.dtype in (torch.float32, torch.float16) else 2

    @property
    def vpair(self) -> int:
        """Consecutive tokens side by side in the value layout."""
        return min(self.pair, self.block_size)

    @property
    def scaled(self) -> bool:
        """Whether codes are multiplied by a scale per token and head."""
        return self.dtype in LARGEST

    @property
    def latent(self) -> bool:
        """Whether it holds latents instead of keys and values per head."""
        return False

    @property
    def element(self) -> torch.dtype:
        """Type of the tensors that hold the caches."""
        return torch.uint8 if self.scaled else self.dtype

    @property
    def format(self) -> int:
        """Number of the format in the native extension."""
        return KV_FORMATS.index(self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value in one layer, scales included."""
        return 2 * self.kv_heads * (self.head_dim * self.dtype.itemsize + (SCALE_BYTES if self.scaled else 0))

    def shapes(self, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the key and value caches of `blocks` blocks."""
        b, h, d = self.block_size, self.kv_heads, self.head_dim
        if self.scaled:
            return ((blocks, h, b * (d + SCALE_BYTES)),) * 2
        return (blocks, h, *self._key_shape()), (blocks, h, *self._value_shape())

    def allocate(self, blocks: int) -> KVCache:
        """Zeroed keys and values of `blocks` blocks."""
        keys, values = self.shapes(blocks)
        return KVCache(self, torch.zeros(keys, dtype=self.element), torch.zeros(values, dtype=self.element))

    def key_codes(self, keys: Tensor) -> Tensor:
        """View of a key cache as [blocks, kv_heads, block_size / lanes, head_dim / pair, lanes, pair]."""
        return self._codes(keys).view(*keys.shape[:2], *self._key_shape()) if self.scaled else keys

    def value_codes(self, values: Tensor) -> Tensor:
        """View of a value cache as [blocks, kv_heads, block_size / vpair, head_dim, vpair]."""
        return self._codes(values).view(*values.shape[:2], *self._value_shape()) if self.scaled else values

    def scales(self, cache: Tensor) -> Tensor:
        """View of the scales of a scaled cache, f32 [blocks, kv_heads, block_size]."""
        return cache[..., self.block_size * self.head_dim :].view(torch.float32)

    def _codes(self, cache: Tensor) -> Tensor:
        return cache[..., : self.block_size * self.head_dim].view(self.dtype)

    def _key_shape(self) -> tuple[int, int, int, int]:
        return self.block_size // self.lanes, self.head_dim // self.pair, self.lanes, self.pair

    def _value_shape(self) -> tuple[int, int, int]:
        return self.block_size // self.vpair, self.head_dim, self.vpair


@dataclass(frozen=True)
class PlainLayout(KVLayout):
    """Keys and values in the logical order [blocks, kv_heads, block_size, head_dim], as a GPU's tiles are loaded.

    Scaled caches hold the codes of a (block, head) in that order and then their scales, as in `KVLayout`.
    """

    @property
    def lanes(self) -> int:
        """One token after the other."""
        return 1

    @property
    def pair(self) -> int:
        """All numbers of a key side by side."""
        return self.head_dim

    @property
    def vpair(self) -> int:
        """One value after the other."""
        return 1


@dataclass(frozen=True)
class KVCache:
    """One layer's keys and values, in the shapes that `layout` says."""

    layout: KVLayout
    keys: Tensor
    values: Tensor

    @property
    def step(self) -> int:
        """Bytes from one block to the next of the keys, and of the values per head."""
        return self.keys.stride(0) * self.keys.element_size()

    @property
    def paired(self) -> bool:
        """Whether there are as many blocks of values as of keys, as far from each other where both are per head."""
        keys, values = self.keys, self.values
        return len(keys) == len(values) and (self.layout.latent or keys.stride()[:2] == values.stride()[:2])

    def logical(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """What `blocks` (int64 [n]) hold: keys and values f32, each [n, kv_heads, block_size, head_dim]."""
        at = self.layout
        keys, values = at.key_codes(self.keys[blocks]), at.value_codes(self.values[blocks])
        shape = (-1, at.kv_heads, at.block_size, at.head_dim)
        k = keys.float().permute(0, 1, 2, 4, 3, 5).reshape(shape)
        v = values.float().permute(0, 1, 2, 4, 3).reshape(shape)
        if at.scaled:
            k = k * at.scales(self.keys[blocks])[..., None]
            v = v * at.scales(self.values[blocks])[..., None]
        return k, v

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [t, kv_heads, head_dim] at `slots` [t] int64 (slot = block * block_size + offset; -1: not)."""
        at, kept = self.layout, slots >= 0
        slots, k, v = slots[kept], k[kept], v[kept]
        block, offset = slots // at.block_size, slots % at.block_size
        if at.scaled:
            k, at.scales(self.keys)[block, :, offset] = quantize_rows(k, at.dtype)
            v, at.scales(self.values)[block, :, offset] = quantize_rows(v, at.dtype)
        shaped = k.to(at.dtype).view(*k.shape[:2], -1, at.pair)
        at.key_codes(self.keys)[block, :, offset // at.lanes, :, offset % at.lanes] = shaped
        at.value_codes(self.values)[block, :, offset // at.vpair, :, offset % at.vpair] = v.to(at.dtype)


def carved(blocks: KVCache, layout: KVLayout, at: int) -> KVCache:
    """Keys and values of a layer of `layout` from byte `at` of the keys of each of `blocks`, and of the values, on."""
    if layout == blocks.layout:
        return blocks
    taken = []
    for part, shape in zip((blocks.keys, blocks.values), layout.shapes(len(blocks.keys)), strict=True):
        nbytes = math.prod(shape[1:]) * layout.element.itemsize
        taken.append(part.view(torch.uint8).flatten(1)[:, at : at + nbytes].view(layout.element).view(shape))
    return KVCache(layout, *taken)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of a scaled cache: x [..., d] f32 is about codes [..., d] * scales [...] f32.

    The scale is max|x| / LARGEST[dtype], codes are x * (LARGEST[dtype] / max|x|) rounded to the nearest, ties to even.
    A row with max|x| below TINY has codes 0; one with an inf or NaN has scale NaN, which its readers see.
    """
    largest = LARGEST[dtype]
    most = x.abs().amax(-1, keepdim=True)
    finite = most.isfinite()
    inverse = torch.where(finite & (most > TINY), largest / most, 0.0)
    codes = (x * inverse).nan_to_num(0.0)
    scales = torch.where(finite, most / largest, torch.nan)[..., 0]
    return (codes.round() if dtype is torch.int8 else codes).to(dtype), scales
