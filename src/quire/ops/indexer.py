"""The lightning indexer of sparse attention: which of the earlier tokens a row reads, and the cache of its keys.

DeepSeek-AI 2025, "DeepSeek-V3.2: pushing the frontier of open large language models". A score of each earlier token is
made of a few small heads, whose keys all heads share, and the tokens with the highest scores are attended to.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.dtypes import Dtype
from quire.ops.layout import KVCache, KVLayout

EPS = 1e-6
"""Of the norm of its keys, whatever config.json says of others, where a family has no other."""


@dataclass(frozen=True)
class Choice:
    """What a row reads: the `most` best tokens, or pools of `pool` tokens and those behind the last whole one."""

    most: int
    pool: int = 1

    @property
    def width(self) -> int:
        """Tokens that a row reads at most."""
        return self.most * self.pool + self.pool - 1


@dataclass(frozen=True)
class Indexer:
    """Sizes of the indexers of a model's layers, all 0 where it has none.

    `heads` of queries with `head_dim` numbers each; `most`: tokens that a row reads at most. `own`: per layer, whether
    it has an indexer; the others read what the last layer before them chose. `interleaved`: on disk, pairs (2i, 2i + 1)
    of its queries and keys turn. `behind`: on disk, the part of a head that turns is its last. `eps`: of the norm of
    keys. `pool`: tokens that have a key together, a mean of theirs, and are chosen together; `most` is a multiple.
    """

    heads: int = 0
    head_dim: int = 0
    most: int = 0
    own: tuple[bool, ...] = ()
    interleaved: bool = False
    behind: bool = False
    eps: float = EPS
    pool: int = 1

    @property
    def kept(self) -> int:
        """Numbers that the cache has of a token: its key, and of pools what gates it there."""
        return self.head_dim * (1 if self.pool == 1 else 2)

    @property
    def choice(self) -> Choice:
        """How many are chosen."""
        return Choice(self.most // self.pool, self.pool)

    def at(self, layer: int) -> bool:
        """Whether `layer` has an indexer of its own."""
        return bool(self.own) and self.own[layer]

    def source(self, layer: int) -> int:
        """The layer whose indexer chooses for `layer`; itself where no layer has one."""
        return next((i for i in range(layer, -1, -1) if self.at(i)), layer)


@dataclass(frozen=True)
class BlockIndexer:
    """Sizes of the indexers of block-sparse attention (MiniMax M3), all 0 where a model has none.

    Each head of keys and values has a head of queries here, of `head_dim` numbers, and reads the `most` blocks of
    `size` tokens with the highest scores, the last `local` ones always. `own`: per layer, whether it has an indexer;
    the others read all tokens.
    """

    head_dim: int = 0
    size: int = 0
    most: int = 0
    local: int = 0
    own: tuple[bool, ...] = ()

    def at(self, layer: int) -> bool:
        """Whether `layer` has an indexer."""
        return bool(self.own) and self.own[layer]


@dataclass(frozen=True)
class PooledIndexer:
    """Sizes of indexers whose keys are of blocks of tokens, means of their tokens' (Qwen4-Exp), 0 where a model has
    none.

    `heads` of queries with `head_dim` numbers each; a row reads, of the whole blocks of `size` tokens up to its own,
    the `most` with the highest scores, and all tokens behind these. `own`: per layer, whether it has an indexer.
    """

    heads: int = 0
    head_dim: int = 0
    size: int = 0
    most: int = 0
    own: tuple[bool, ...] = ()

    def at(self, layer: int) -> bool:
        """Whether `layer` has an indexer."""
        return bool(self.own) and self.own[layer]


NO_INDEXER = Indexer()
NO_BLOCK_INDEXER = BlockIndexer()
NO_POOLED_INDEXER = PooledIndexer()


@dataclass(frozen=True)
class IndexLayout(KVLayout):
    """Layout of a layer's index keys [blocks, block_size, head_dim], one for all heads of the indexer; there are no
    values."""

    @classmethod
    def of(cls, block_size: int, head_dim: int, dtype: Dtype) -> IndexLayout:
        """The layout of keys of `head_dim` numbers."""
        return cls(block_size, 1, head_dim, dtype)

    @property
    def even(self) -> bool:
        """All bytes lie in one array."""
        return False

    @property
    def valued(self) -> bool:
        """Keys alone."""
        return False

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key in one layer."""
        return self.head_dim * self.dtype.itemsize

    def shapes(self, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the keys of `blocks` blocks, and of nothing."""
        return (blocks, self.block_size, self.head_dim), (blocks, 0)


def index_dim(cache: KVCache) -> int:
    """Numbers of an index key; `TypeError` when the cache holds something else."""
    if not isinstance(cache.layout, IndexLayout):
        raise TypeError("a cache of index keys is needed")
    return cache.layout.head_dim


def key_dim(cache: KVCache, choice: Choice) -> int:
    """Numbers of a key that queries meet; those of pools have as many behind them."""
    return index_dim(cache) // (1 if choice.pool == 1 else 2)
