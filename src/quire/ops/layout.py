"""How keys and values lie in memory: permutations of the logical [blocks, kv_heads, block_size, head_dim].

The CPU layout puts up to 16 tokens of a block into the lanes of a vector register for q.k, and pairs of tokens side by
side for p.v, so that bf16 dot-product instructions read both without a transpose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LANES = 16


@dataclass(frozen=True)
class KVLayout:
    """Layout of one layer's key and value caches.

    keys   [blocks, kv_heads, block_size / lanes, head_dim / pair, lanes, pair]
    values [blocks, kv_heads, block_size / vpair, head_dim, vpair]
    with lanes = min(block_size, 16), pair = 2 for bf16 and 1 for f32, vpair = min(pair, block_size).
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
        return 2 if self.dtype == torch.bfloat16 else 1

    @property
    def vpair(self) -> int:
        """Consecutive tokens side by side in the value layout."""
        return min(self.pair, self.block_size)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def shapes(self, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the key and value caches of `blocks` blocks."""
        b, h, d = self.block_size, self.kv_heads, self.head_dim
        keys = (blocks, h, b // self.lanes, d // self.pair, self.lanes, self.pair)
        return keys, (blocks, h, b // self.vpair, d, self.vpair)

    def allocate(self, blocks: int) -> KVCache:
        """Zeroed keys and values of `blocks` blocks."""
        keys, values = self.shapes(blocks)
        return KVCache(self, torch.zeros(keys, dtype=self.dtype), torch.zeros(values, dtype=self.dtype))


@dataclass(frozen=True)
class KVCache:
    """One layer's keys and values, in the shapes that `layout` says."""

    layout: KVLayout
    keys: Tensor
    values: Tensor

    def logical(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of keys and values of `blocks` (int64 [n]), each [n, kv_heads, block_size, head_dim]."""
        shape = (-1, self.layout.kv_heads, self.layout.block_size, self.layout.head_dim)
        keys = self.keys[blocks].permute(0, 1, 2, 4, 3, 5).reshape(shape)
        return keys, self.values[blocks].permute(0, 1, 2, 4, 3).reshape(shape)

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [t, kv_heads, head_dim] at `slots` [t] int64 (slot = block * block_size + offset)."""
        at = self.layout
        block, offset = slots // at.block_size, slots % at.block_size
        shaped = k.to(at.dtype).view(*k.shape[:2], -1, at.pair)
        self.keys[block, :, offset // at.lanes, :, offset % at.lanes] = shaped
        self.values[block, :, offset // at.vpair, :, offset % at.vpair] = v.to(at.dtype)
