"""How keys and values lie in memory: permutations of the logical [blocks, kv_heads, block_size, head_dim].

The CPU layout puts up to 16 tokens of a block into the lanes of a vector register for q.k, and pairs of tokens side by
side for p.v, so that bf16 dot-product instructions read both without a transpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quire.core.dtypes import BF16, F8, F16, F32, I8, U8, Dtype
from quire.ops.arrays import Array, byte_strides, view_as
from quire.ops.facts import LANES, dtype_numbers_of

KV_FORMATS = (F32, BF16, F16, I8, F8)
_NUMBERS = dtype_numbers_of("cache")
LARGEST = {I8: 127.0, F8: 448.0}
"""The code that the largest number of a scaled row gets."""
SCALE_BYTES = 4


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
    dtype: Dtype

    @property
    def lanes(self) -> int:
        """Tokens side by side in the key layout."""
        return min(self.block_size, LANES)

    @property
    def pair(self) -> int:
        """Consecutive head dimensions side by side in the key layout."""
        return 1 if self.dtype in (F32, F16) else 2

    @property
    def vpair(self) -> int:
        """Consecutive tokens side by side in the value layout."""
        return min(self.pair, self.block_size)

    @property
    def scaled(self) -> bool:
        """Whether codes are multiplied by a scale per token and head."""
        return self.dtype in LARGEST

    @property
    def even(self) -> bool:
        """Whether keys and values take as many bytes, so that kernels find both by one step from block to block."""
        return True

    @property
    def valued(self) -> bool:
        """Whether there are values beside the keys."""
        return True

    @property
    def stays(self) -> bool:
        """Whether it is read however far back it lies, whatever the window of its layer."""
        return False

    @property
    def element(self) -> Dtype:
        """Dtype of the arrays that hold the caches."""
        return U8 if self.scaled else self.dtype

    @property
    def format(self) -> int:
        """Number of the format in the native extension."""
        return _NUMBERS[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value in one layer, scales included."""
        return 2 * self.kv_heads * (self.head_dim * self.dtype.itemsize + (SCALE_BYTES if self.scaled else 0))

    def shapes(self, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the key and value caches of `blocks` blocks."""
        b, h, d = self.block_size, self.kv_heads, self.head_dim
        if self.scaled:
            return ((blocks, h, b * (d + SCALE_BYTES)),) * 2
        return (blocks, h, *self.key_shape), (blocks, h, *self.value_shape)

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        """Shape of the keys of a block and head."""
        return self.block_size // self.lanes, self.head_dim // self.pair, self.lanes, self.pair

    @property
    def value_shape(self) -> tuple[int, int, int]:
        """Shape of the values of a block and head."""
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
class SharedLayout(KVLayout):
    """Layout of blocks of which several layers have some bytes each (`carved`): `head_dim` bytes of a token, uint8.

    They are one array, keys [blocks, block_size * head_dim]; there are no values.
    """

    @classmethod
    def of(cls, block_size: int, width: int) -> SharedLayout:
        """The layout of blocks that have `width` bytes of each token."""
        return cls(block_size, 1, width, U8)

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
        """Bytes of one token."""
        return self.head_dim

    def shapes(self, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the bytes of `blocks` blocks, and of nothing."""
        return (blocks, self.block_size * self.head_dim), (blocks, 0)


CacheLayout = tuple[KVLayout, ...]
"""How each part of a layer's cache lies: keys and values per head are one part; none where a layer keeps no tokens."""


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values, one part of a layer's cache, in the shapes that `layout` says."""

    layout: KVLayout
    keys: Array
    values: Array

    @property
    def step(self) -> int:
        """Bytes from one block to the next of the keys, and of the values where both take as many."""
        return byte_strides(self.keys)[0]

    @property
    def paired(self) -> bool:
        """Whether there are as many blocks of values as of keys, as far from each other where both take as many
        bytes."""
        keys, values = self.keys, self.values
        return len(keys) == len(values) and (not self.layout.even or byte_strides(keys)[:2] == byte_strides(values)[:2])

    def head(self, index: int) -> KVCache:
        """Keys and values of one head alone, where they lie."""
        own = slice(index, index + 1)
        return KVCache(replace(self.layout, kv_heads=1), self.keys[:, own], self.values[:, own])

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What holds the bytes of its blocks."""
        return (self.keys, self.values) if self.layout.valued else (self.keys,)


LayerCache = tuple[KVCache, ...]
"""The parts of one layer's cache, as its mixer says them."""


@dataclass(frozen=True)
class StateLayout:
    """Layout of one layer's recurrent states, f32 [slots, heads, keys, values]: `heads` matrices for a sequence."""

    heads: int
    keys: int
    values: int

    @property
    def nbytes(self) -> int:
        """Bytes of the state of one sequence."""
        return 4 * self.heads * self.keys * self.values

    def shape(self, slots: int) -> tuple[int, int, int, int]:
        """Shape of the states of `slots` sequences."""
        return slots, self.heads, self.keys, self.values


class StatefulCache(tuple[KVCache, ...]):
    """A `LayerCache` of a layer that has a recurrent state, too: `states` f32 [slots, heads, keys, values]."""

    states: Array


def with_states(cache: LayerCache, states: Array) -> StatefulCache:
    """The parts of `cache`, and `states` beside them."""
    found = StatefulCache(cache)
    found.states = states
    return found


def carved(blocks: KVCache, layout: KVLayout, at: int) -> KVCache:
    """Keys of a layer of `layout` from byte `at` of each of `blocks`, of `SharedLayout`, on, and values behind them."""
    taken = []
    for shape in layout.shapes(len(blocks.keys)):
        nbytes = math.prod(shape[1:]) * layout.element.itemsize
        taken.append(view_as(blocks.keys[:, at : at + nbytes], layout.element).reshape(*shape))
        at += nbytes
    return KVCache(layout, *taken)
