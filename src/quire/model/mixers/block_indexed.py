"""Attention to blocks of tokens that an indexer chooses for each head of keys and values (MiniMax M3)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.core.dtypes import BF16, F16, F32, Dtype
from quire.core.errors import ConfigError
from quire.core.exclusions import features as known
from quire.core.exclusions.features import Feature
from quire.model.mixers.attention import Attention
from quire.model.role import ROWS, SHARED, Role
from quire.model.spec import ModelSpec
from quire.ops.indexer import IndexLayout
from quire.ops.layout import CacheLayout, KVLayout


@dataclass(frozen=True)
class BlockIndexedAttention(Attention):
    """A `Mixer`. Blocks are of `size` tokens; keys and queries of the indexer have `index_dim` numbers."""

    features: frozenset[Feature] = frozenset({known.BLOCK_INDEXERS})
    size: int = 0
    index_dim: int = 0

    @property
    def projected(self) -> int:
        """Numbers of queries, keys and values, and of the indexer's queries and key."""
        return super().projected + (self.kv_heads + 1) * self.index_dim

    def parts(self, block_size: int, dtype: Dtype, heads: type[KVLayout] = KVLayout) -> CacheLayout:
        """Keys and values as the backend lays them, and keys of the indexer, in bf16 or f32 whatever those have.

        `ConfigError` where a block is not whole blocks of the cache.
        """
        if self.size % block_size:
            raise ConfigError(
                f"--block-size {block_size}: this model chooses blocks of {self.size} tokens, which must be whole "
                f"blocks of the cache; use one that divides {self.size}",
                param="block_size",
            )
        kept = dtype if dtype in (F32, BF16) else F32 if dtype == F16 else BF16
        return (*super().parts(block_size, dtype, heads), IndexLayout.of(block_size, self.index_dim, kept))


def block_indexed(spec: ModelSpec) -> BlockIndexedAttention:
    """The mixer of a layer with an indexer."""
    sizes = spec.blocks
    return BlockIndexedAttention(spec.heads, spec.kv_heads, spec.head_dim, size=sizes.size, index_dim=sizes.head_dim)


def _width(spec: ModelSpec) -> int:
    return spec.blocks.head_dim


ROLES = {
    name: replace(role, optional=True, where=lambda s, layer: s.blocks.at(layer))
    for name, role in {
        "block_index_q": Role(
            "linear", lambda s: (s.kv_heads * _width(s), s.hidden), ROWS, lambda s: s.kv_heads, spread=SHARED
        ),
        "block_index_k": Role("linear", lambda s: (_width(s), s.hidden)),
        "block_index_q_norm": Role("vector", lambda s: (_width(s),)),
        "block_index_k_norm": Role("vector", lambda s: (_width(s),)),
    }.items()
}
"""Its matrices and vectors on disk, beside those of attention; queries are split over ranks by heads of keys and
values."""
