"""Attention to blocks of tokens that an indexer chooses for all heads, by one key for each block (Qwen4-Exp)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.core.dtypes import BF16, F16, F32, Dtype
from quire.core.errors import ConfigError
from quire.core.exclusions import features as known
from quire.core.exclusions.features import Feature
from quire.model.mixers.attention import Attention
from quire.model.role import Role
from quire.model.spec import ModelSpec
from quire.ops.convolution import RowLayout
from quire.ops.indexer import NO_POOLED_INDEXER, IndexLayout, PooledIndexer
from quire.ops.layout import CacheLayout, KVLayout


@dataclass(frozen=True)
class PooledIndexedAttention(Attention):
    """A `Mixer`. `indexer`: sizes of what chooses."""

    features: frozenset[Feature] = frozenset({known.BLOCK_INDEXERS})
    indexer: PooledIndexer = NO_POOLED_INDEXER

    @property
    def projected(self) -> int:
        """Numbers of queries, keys and values, and of the indexer's queries and key."""
        return super().projected + (self.indexer.heads + 1) * self.indexer.head_dim

    def parts(self, block_size: int, dtype: Dtype, heads: type[KVLayout] = KVLayout) -> CacheLayout:
        """Keys and values as the backend lays them; keys of tokens of the indexer, of which those of blocks are made,
        and these, in bf16 or f32 whatever the first have.

        `ConfigError` where a block is not whole blocks of the cache.
        """
        size = self.indexer.size
        if size % block_size:
            raise ConfigError(
                f"--block-size {block_size}: this model chooses blocks of {size} tokens, which must be whole blocks of "
                f"the cache; use one that divides {size}",
                param="block_size",
            )
        kept = dtype if dtype in (F32, BF16) else F32 if dtype == F16 else BF16
        d = self.indexer.head_dim
        own = RowLayout.of(block_size, d, kept), IndexLayout.of(block_size, d, kept)
        return (*super().parts(block_size, dtype, heads), *own)


def pooled_indexed(spec: ModelSpec) -> PooledIndexedAttention:
    """The mixer of a layer with an indexer."""
    return PooledIndexedAttention(spec.heads, spec.kv_heads, spec.head_dim, indexer=spec.pooled)


def _width(spec: ModelSpec) -> int:
    return spec.pooled.head_dim


ROLES = {
    name: replace(role, optional=True, where=lambda s, layer: s.pooled.at(layer))
    for name, role in {
        "pooled_index_q": Role("linear", lambda s: (s.pooled.heads * _width(s), s.hidden)),
        "pooled_index_k": Role("linear", lambda s: (_width(s), s.hidden)),
        "pooled_index_q_norm": Role("vector", lambda s: (_width(s),)),
        "pooled_index_k_norm": Role("vector", lambda s: (_width(s),)),
    }.items()
}
"""Its matrices and vectors on disk, beside those of attention. Each rank has all of them: what is chosen is chosen for
all heads."""
