"""Entries of a cache: rows that stand for some tokens each (DeepSeek-AI 2026, "DeepSeek-V4").

A layer keeps the last tokens' keys, which are their values too, and behind these entries alone. An entry is a sum over
the tokens that it stands for, and over those of the entry before where rows have two parts, weighed by softmaxes of
gates that rows have for each number; it is normed, and turned by the position of its first token. What makes it are
rows in a cache with a window; it is there once its last token is.

In which order a row is computed, so that its bits depend on no cut and no batch:

1. What a row gives to entries, and its key, are rounded to the format of the cache, and stored.
2. The row that ends an entry makes it, of rows as the cache has them, those of this step too; sums ascend by token.
3. An entry lies in the block of its last token, in the table of what stays: whoever has the block has the entry.
4. A layer writes all of a step before it reads: of a draft that is taken back, what comes next writes all again.
5. A row at position p reads entries of tokens up to its own alone: (p + 1) // every, or those that an indexer chooses
   of these; of equal scores the earlier ones.
6. Its list is these entries, ascending, and behind them the tokens of its window, ascending; sums go by the list.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.dtypes import Dtype
from quire.ops.arrays import Array
from quire.ops.indexer import IndexLayout
from quire.ops.layout import KVCache


@dataclass(frozen=True)
class EntrySizes:
    """Sizes of layers that read entries, all 0 where a model has none.

    Queries pass through a space of `q_rank` numbers, `turned` numbers of each head turn; results of `groups` of heads
    pass through `o_rank` numbers each. A row reads the last `window` tokens, and of each layer entries of `every`
    tokens, 0 = none. Where `pairs` says so, rows have two parts, and an indexer of `index_heads` heads of `index_dim`
    numbers chooses `most` entries.
    """

    q_rank: int = 0
    turned: int = 0
    groups: int = 0
    o_rank: int = 0
    window: int = 0
    every: tuple[int, ...] = ()
    pairs: tuple[bool, ...] = ()
    index_heads: int = 0
    index_dim: int = 0
    most: int = 0

    def single(self, layer: int) -> bool:
        """Whether rows of `layer` have one part each."""
        return bool(self.every) and self.every[layer] > 0 and not self.pairs[layer]

    def paired(self, layer: int) -> bool:
        """Whether they have two, and an indexer chooses."""
        return bool(self.every) and self.pairs[layer]

    def of_kind(self, paired: bool) -> int:
        """Tokens that an entry of layers of one kind stands for, which is the same in all of them; 0: there are
        none."""
        kinds = zip(self.every, self.pairs, strict=True)
        return next((every for every, pair in kinds if every and pair == paired), 0)

    def kept(self, layer: int) -> int:
        """Tokens back that a cache of rows is read in `layer`."""
        return max(self.window, self.every[layer] * (1 + self.pairs[layer]))


NO_ENTRIES = EntrySizes()


@dataclass(frozen=True)
class EntryLayout(IndexLayout):
    """Layout of entries [blocks, entries of a block, head_dim] of `every` tokens each, in the blocks of their last.

    Blocks hold whole entries, or an entry stands for whole blocks.
    """

    every: int = 1

    @property
    def stays(self) -> bool:
        """Entries are read however far back they lie."""
        return True

    @property
    def entries(self) -> int:
        """Entries of a block."""
        return max(1, self.block_size // self.every)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a block's entries for each token, rounded up."""
        return -(-self.entries * self.head_dim * self.dtype.itemsize // self.block_size)

    def shapes(self, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the entries of `blocks` blocks, and of nothing."""
        return (blocks, self.entries, self.head_dim), (blocks, 0)

    @classmethod
    def of_tokens(cls, block_size: int, head_dim: int, dtype: Dtype, every: int) -> EntryLayout:
        """The layout of entries of `head_dim` numbers."""
        return cls(block_size, 1, head_dim, dtype, every)


@dataclass(frozen=True, eq=False)
class Pool:
    """How rows become entries of d numbers: `bias` f32 [every, series * d] of gates by a token's place, `norm` f32 [d],
    its `eps`, and `table` f32 [max_positions, 2, half], as of `rope_queries`. `series`: parts of a row."""

    bias: Array
    norm: Array
    eps: float
    table: Array
    series: int

    @property
    def every(self) -> int:
        """Tokens that an entry stands for."""
        return int(self.bias.shape[0])


@dataclass(frozen=True, eq=False)
class EntryReads:
    """How rows read: `scale` of their scores, the last `window` tokens, `sinks` f32 [heads] as of `AttentionSpec`;
    `chosen` [T, most] int32, as of `choose_tokens`, of entries, None: all."""

    scale: float
    window: int
    sinks: Array | None = None
    chosen: Array | None = None


def every_of(cache: KVCache) -> int:
    """Tokens that a row of `cache` stands for."""
    layout = cache.layout
    return layout.every if isinstance(layout, EntryLayout) else 1
