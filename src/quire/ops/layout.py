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

    def allocate(self, blocks: int) -> tuple[Tensor, Tensor]:
        """Zeroed key and value caches for `blocks` blocks."""
        keys, values = self.shapes(blocks)
        return torch.zeros(keys, dtype=self.dtype), torch.zeros(values, dtype=self.dtype)

    def logical_keys(self, keys: Tensor) -> Tensor:
        """A copy of `keys` as [blocks, kv_heads, block_size, head_dim]."""
        return keys.permute(0, 1, 2, 4, 3, 5).reshape(-1, self.kv_heads, self.block_size, self.head_dim)

    def logical_values(self, values: Tensor) -> Tensor:
        """A copy of `values` as [blocks, kv_heads, block_size, head_dim]."""
        return values.permute(0, 1, 2, 4, 3).reshape(-1, self.kv_heads, self.block_size, self.head_dim)

    def write(self, keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [t, kv_heads, head_dim] at `slots` [t] (slot = block * block_size + offset)."""
        block, offset = slots // self.block_size, slots % self.block_size
        shaped = k.to(self.dtype).reshape(*k.shape[:2], self.head_dim // self.pair, self.pair)
        keys[block, :, offset // self.lanes, :, offset % self.lanes] = shaped
        values[block, :, offset // self.vpair, :, offset % self.vpair] = v.to(self.dtype)
