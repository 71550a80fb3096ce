"""Latent attention to tokens that an indexer chooses (sparse attention, DeepSeek-AI 2025)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import Dtype
from quire.core.exclusions import features as known
from quire.model.mixers.latent import Latents
from quire.model.role import Role
from quire.model.spec import ModelSpec
from quire.ops.indexer import IndexLayout
from quire.ops.layout import CacheLayout, KVLayout


@dataclass(frozen=True)
class IndexedLatents(Latents):
    """A `Mixer`. An indexer of `index_heads` with `index_dim` numbers each chooses the tokens; none where `index_heads`
    is 0, and tokens are those that the last layer with an indexer chose. `index_kept`: numbers that the cache has of a
    token for it."""

    index_heads: int = 0
    index_dim: int = 0
    index_kept: int = 0

    @property
    def projected(self) -> int:
        """Numbers that latents need, and queries, key and weights of the indexer."""
        indexer = self.index_heads * (self.index_dim + 1) + self.index_kept if self.index_heads else 0
        return super().projected + indexer

    def parts(self, block_size: int, dtype: Dtype, heads: type[KVLayout] = KVLayout) -> CacheLayout:
        """Latents, and keys of the indexer where there is one, on every backend alike."""
        latents = super().parts(block_size, dtype, heads)
        return (*latents, IndexLayout.of(block_size, self.index_kept, dtype)) if self.index_heads else latents


ROLES = {
    name: replace(role, optional=True, where=lambda s, layer: s.attends(layer) and s.at(layer).mla.indexer.at(layer))
    for name, role in {
        "index_q": Role("linear", lambda s: (s.mla.indexer.heads * s.mla.indexer.head_dim, s.mla.q_rank)),
        "index_k": Role("linear", lambda s: (s.mla.indexer.head_dim, s.hidden)),
        "index_k_norm": Role("vector", lambda s: (s.mla.indexer.head_dim,), biased=True),
        "index_weights": Role("dense", lambda s: (s.mla.indexer.heads, s.hidden)),
        "index_gate": Role("linear", lambda s: (s.mla.indexer.head_dim, s.hidden)),
        "index_bias": Role("vector", lambda s: (s.mla.indexer.pool, s.mla.indexer.head_dim)),
    }.items()
}
"""Its matrices and vectors on disk, beside those of latent attention. Each rank has all of them: what is chosen is
chosen for all heads."""
SHARING = frozenset({known.LATENTS, known.SHARED_INDEXERS})


def pairs_of_heads(heads: int, before: int, turned: int) -> NDArray[np.int64]:
    """Rows of heads whose last `turned` numbers turn, in files by pairs of neighbours: where ours lie, of halves."""
    pairs = np.arange(turned, dtype=np.int64).reshape(-1, 2)
    each = np.concatenate((np.arange(before, dtype=np.int64), before + pairs.T.flatten()))
    return (np.arange(heads, dtype=np.int64)[:, None] * len(each) + each).flatten()


def keys_of_indexers(spec: ModelSpec) -> NDArray[np.int64]:
    """Rows of an indexer's key in a file: where ours lie."""
    return pairs_of_heads(1, spec.mla.indexer.head_dim - spec.mla.rope, spec.mla.rope)


NEIGHBOURS: Mapping[str, Callable[[ModelSpec], NDArray[np.int64]]] = {
    "q_b": lambda spec: pairs_of_heads(spec.heads, spec.mla.nope, spec.mla.rope),
    "kv_a": lambda spec: pairs_of_heads(1, spec.mla.rank, spec.mla.rope),
    "index_q": lambda spec: pairs_of_heads(
        spec.mla.indexer.heads, spec.mla.indexer.head_dim - spec.mla.rope, spec.mla.rope
    ),
    "index_k": keys_of_indexers,
    "index_k_norm": keys_of_indexers,
}
"""Where our rows, of which halves of heads turn, lie in files in which neighbours do; indexers turn their last
numbers."""


def indexed_latents(spec: ModelSpec, layer: int) -> IndexedLatents:
    """The mixer of `layer`."""
    mla, indexer = spec.mla, spec.mla.indexer
    own = all(indexer.at(i) for i in range(spec.layers) if spec.attends(i))
    features = IndexedLatents.features if own else SHARING
    sizes = (indexer.heads, indexer.head_dim, indexer.kept) if indexer.at(layer) else (0, 0, 0)
    return IndexedLatents(
        *(spec.heads, spec.head_dim, mla.q_rank, mla.rank, mla.rope),
        features=features, index_heads=sizes[0], index_dim=sizes[1], index_kept=sizes[2],
    )  # fmt: skip
