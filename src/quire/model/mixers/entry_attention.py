"""Attention to the last tokens and to entries that stand for some tokens each before these (DeepSeek V4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import BF16, F16, F32, Dtype
from quire.core.errors import ConfigError
from quire.core.exclusions import features as known
from quire.core.exclusions.features import Feature
from quire.core.exclusions.table import row_of
from quire.model.mixers.mixer import KV_TYPES
from quire.model.role import Role
from quire.model.spec import ModelSpec
from quire.ops.entries import EntryLayout, EntrySizes
from quire.ops.indexer import IndexLayout
from quire.ops.layout import CacheLayout, KVLayout, StateLayout

FORMATS = (BF16, F32)
"""Of rows and entries."""


@dataclass(frozen=True)
class EntryAttention:
    """A `Mixer` of a layer, which has entries of `every` tokens, 0 = none; where rows have two parts in these (`pairs`)
    an indexer chooses. Other sizes are those of `quire.ops.entries.EntrySizes`."""

    heads: int
    head_dim: int
    sizes: EntrySizes
    every: int = 0
    pairs: bool = False
    features: frozenset[Feature] = frozenset({known.ENTRIES})
    own_heads: bool = False
    scaled: bool = False
    state: StateLayout | None = None
    out: str = "entry_o"

    @property
    def read(self) -> tuple[int, int, int]:
        """All heads read the same keys, which are the values."""
        return self.heads, 1, self.head_dim

    @property
    def projected(self) -> int:
        """Numbers of the spaces of queries and results, of queries and a key, and of what entries are made of."""
        sizes, pooled = self.sizes, 2 * self.head_dim * (1 + self.pairs) if self.every else 0
        if self.pairs:
            pooled += 4 * sizes.index_dim + sizes.index_heads * (sizes.index_dim + 1)
        return sizes.q_rank + sizes.groups * sizes.o_rank + (self.heads + 1) * self.head_dim + pooled

    def kept_in(self, asked: str, dtype: Dtype, backend: str) -> Dtype:
        """Keep rows and entries in bf16 or f32; those of f16 weights in f32."""
        kept = KV_TYPES.get(asked, F32 if dtype == F16 else dtype)
        if kept not in FORMATS:
            raise row_of(known.KV_FORMAT, known.ENTRIES).refusal({})
        return kept

    def parts(self, block_size: int, dtype: Dtype, heads: type[KVLayout] = KVLayout) -> CacheLayout:
        """Keys, rows of which entries and keys of the indexer are made, and behind these what stays.

        `ConfigError` where blocks do not hold whole entries, nor an entry stands for whole blocks.
        """
        keys = IndexLayout.of(block_size, self.head_dim, dtype)
        if not self.every:
            return (keys,)
        if block_size % self.every and self.every % block_size:
            raise ConfigError(
                f"--block-size {block_size}: this model has entries that stand for {self.every} tokens, of which "
                f"blocks hold whole ones, or several blocks one; use one that divides {self.every}, or a multiple",
                param="block_size",
            )
        widths = (self.head_dim, self.sizes.index_dim) if self.pairs else (self.head_dim,)
        rows = (IndexLayout.of(block_size, 2 * (1 + self.pairs) * width, dtype) for width in widths)
        return keys, *rows, *(EntryLayout.of_tokens(block_size, width, dtype, self.every) for width in widths)


def mixer_with_entries(spec: ModelSpec, layer: int) -> EntryAttention:
    """The mixer of `layer`."""
    sizes = spec.entries
    return EntryAttention(spec.heads, spec.head_dim, sizes, sizes.every[layer], sizes.pairs[layer])


def turned_first(count: int, width: int, turned: int) -> NDArray[np.int64]:
    """Rows of `count` heads of `width` numbers, of which in files the last `turned` turn by pairs of neighbours: where
    ours lie, of which the first turn, by halves."""
    pairs = np.arange(width - turned, width, dtype=np.int64).reshape(-1, 2)
    each = np.concatenate((pairs.T.flatten(), np.arange(width - turned, dtype=np.int64)))
    return (np.arange(count, dtype=np.int64)[:, None] * width + each).flatten()


def _indexed(spec: ModelSpec, layer: int) -> bool:
    return spec.entries.paired(layer)


def _made_of(of_kind: bool, width: Callable[[ModelSpec], int], prefix: str) -> dict[str, Role]:
    """What makes entries of `width` numbers of rows that have one part or, if `of_kind`, two."""
    series = 1 + of_kind
    where = _indexed if of_kind else lambda s, layer: s.entries.single(layer)
    matrix = Role("linear", lambda s: (series * width(s), s.hidden), wide=True)
    found = {
        "numbers": matrix,
        "gates": matrix,
        "bias": Role("vector", lambda s: (s.entries.of_kind(of_kind), series * width(s))),
        "norm": Role("vector", lambda s: (width(s),)),
    }
    return {f"{prefix}_{name}": replace(role, where=where, optional=True) for name, role in found.items()}


_ALWAYS = {
    "entry_q_a": Role("linear", lambda s: (s.entries.q_rank, s.hidden)),
    "entry_q_a_norm": Role("vector", lambda s: (s.entries.q_rank,)),
    "entry_q_b": Role("linear", lambda s: (s.heads * s.head_dim, s.entries.q_rank)),
    "entry_k": Role("linear", lambda s: (s.head_dim, s.hidden)),
    "entry_k_norm": Role("vector", lambda s: (s.head_dim,)),
    "entry_o_a": Role(
        "linear",
        lambda s: (s.entries.groups * s.entries.o_rank, s.heads * s.head_dim // s.entries.groups),
        wide=True,
    ),
    "entry_o": Role("linear", lambda s: (s.hidden, s.entries.groups * s.entries.o_rank)),
}
ROLES = {
    **{
        name: replace(role, where=lambda s, layer: bool(s.entries.window), optional=True)
        for name, role in _ALWAYS.items()
    },
    **_made_of(False, lambda s: s.head_dim, "entry"),
    **_made_of(True, lambda s: s.head_dim, "paired"),
    **_made_of(True, lambda s: s.entries.index_dim, "entry_index"),
    "entry_index_q": Role(
        "linear", lambda s: (s.entries.index_heads * s.entries.index_dim, s.entries.q_rank), where=_indexed,
        optional=True,
    ),
    "entry_index_weights": Role(
        "dense", lambda s: (s.entries.index_heads, s.hidden), where=_indexed, optional=True
    ),
}  # fmt: skip
"""Its matrices and vectors on disk."""
