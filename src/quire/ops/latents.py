"""The cache of multi-head latent attention (DeepSeek-AI 2024): a latent and a rotated key per token, for all heads."""

from __future__ import annotations

from dataclasses import dataclass

from quire.ops.arrays import Array
from quire.ops.layout import KVCache, KVLayout

EPS = 1e-6
"""Of the norm of latents in most families, whatever config.json says of the others."""


@dataclass(frozen=True)
class LatentLayout(KVLayout):
    """Layout of one layer's latents: keys [blocks, block_size, head_dim], values [blocks, block_size, rank].

    `head_dim` is the size of the rotated key, which all heads share (`kv_heads` 1); the latents are the values, and the
    rest of the keys.
    """

    rank: int = 0

    @property
    def even(self) -> bool:
        """Rotated keys are shorter than latents."""
        return False

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's latent and rotated key in one layer."""
        return (self.rank + self.head_dim) * self.dtype.itemsize

    def shapes(self, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the rotated keys and of the latents of `blocks` blocks."""
        return (blocks, self.block_size, self.head_dim), (blocks, self.block_size, self.rank)


def rank_of(cache: KVCache) -> int:
    """Numbers of a latent; `TypeError` when the cache holds keys and values per head."""
    if not isinstance(cache.layout, LatentLayout):
        raise TypeError("a cache of latents is needed")
    return cache.layout.rank


@dataclass(frozen=True, eq=False)
class LatentHeads:
    """How many heads a layer's queries have, and the weight f32 [rank] of the norm of its latents, and its eps."""

    count: int
    norm: Array
    eps: float = EPS


@dataclass(frozen=True, eq=False)
class LatentReads:
    """How rows read latents: `scale` of their scores; `chosen` [T, most] int32, as of `choose_tokens`, where each row
    reads these tokens alone, None: all up to its own that `window` has; `sinks` f32 [heads] and `window`, 0 beside
    `chosen`, as of `AttentionSpec`. `pool`: tokens that are chosen together."""

    scale: float
    chosen: Array | None = None
    sinks: Array | None = None
    window: int = 0
    pool: int = 1
