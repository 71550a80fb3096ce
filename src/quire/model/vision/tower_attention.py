"""Attention over an image: each row sees all rows of its tile or window, itself and later ones included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from quire.core.dtypes import F32, Dtype
from quire.model.spec import ModelSpec
from quire.model.vision.account import PIECE
from quire.model.vision.patch_positions import Groups, Places
from quire.ops.arrays import Array, Host
from quire.ops.backend import Ops
from quire.ops.layout import KVLayout
from quire.ops.lazy import require_torch

BLOCK = 128
"""Rows of a block of keys, the most there may be: tables of blocks are short, and the last block wastes little."""


class Attention(Protocol):
    """The attention of one layer over all rows of an image: all are written before any is asked for."""

    def write(self, rows: slice, qkv: Any) -> None:
        """Turn queries and keys of some rows, qkv [rows, 3 hidden], perhaps in place, and keep them and the values."""
        ...

    def attend(self) -> Iterator[tuple[slice | Places, Array]]:
        """Some rows and their softmax(q k^T) v [rows, hidden], valid until the next, until all were there.

        Memory of outputs is taken back before each, not after it.
        """
        ...


class PagedAttention:
    """Attention by the kernel that decoders use, over blocks of keys and values, so that bits depend on no other
    row."""

    def __init__(self, ops: Ops, spec: ModelSpec, groups: Groups, table: Host, dtype: Dtype) -> None:
        self._ops, self._spec, self._groups = ops, spec, groups
        count, most = sum(g.size for g in groups), max(g.shape[1] for g in groups)
        size = min(BLOCK, 1 << max(most - 1, 15).bit_length())
        self._each, first = -(-most // size), 0
        self._slots = np.empty(count, np.int64)
        for rows in groups:
            start = (np.arange(first, first + len(rows)) * self._each * size)[:, None]
            self._slots[rows] = start + np.arange(rows.shape[1])
            first += len(rows)
        layout = KVLayout(size, spec.heads, spec.head_dim, dtype)
        self._cache = ops.allocate_cache(layout, first * self._each)
        self._positions, self._table = (np.arange(count) % len(table)).astype(np.int32), table
        self._q = np.empty((count, spec.hidden), F32)
        self._parts = tuple(self._parted())

    def _parted(self) -> Iterator[tuple[slice | Places, tuple[int, int], Host, int]]:
        """Rows that go into the op together: where they are, (groups, rows of each), the blocks and number of keys."""
        first = 0
        for rows in self._groups:
            blocks = np.arange(first, first + len(rows) * self._each, dtype=np.int32).reshape(len(rows), -1)
            first += blocks.size
            for queries in np.array_split(rows, -(-rows.shape[1] // PIECE), 1):
                together = max(PIECE // queries.shape[1], 1)
                for start in range(0, len(queries), together):
                    some = queries[start : start + together]
                    yield _where(some.reshape(-1)), some.shape, blocks[start : start + together], rows.shape[1]

    def write(self, rows: slice, qkv: Host) -> None:
        """Turn queries and keys of some rows, qkv [rows, 3 hidden], in place, and keep them and the values."""
        positions, slots = self._positions[rows], self._slots[rows]
        self._ops.rope_and_cache(qkv, positions, self._table, slots, self._cache, None, 1.0)
        self._ops.place_columns(self._q[rows], qkv[:, : self._spec.hidden], 0)

    def attend(self) -> Iterator[tuple[slice | Places, Host]]:
        """Some rows and their softmax(q k^T) v [rows, hidden] f32, until all were there."""
        for at, shape, tables, seen in self._parts:
            context = np.full(shape[0], seen, np.int32)
            self._ops.begin_step()
            q = self._q[at].reshape(*shape, -1)
            yield at, self._ops.whole_attention(q, self._cache, context, tables, self._spec.attention_scale)


def _where(rows: Places) -> slice | Places:
    """Rows [n] int64 as a slice, whose copies are views, where they follow each other."""
    first, count = int(rows[0]), len(rows)
    return slice(first, first + count) if bool((np.diff(rows) == 1).all()) else rows


def attention_of(ops: Ops, spec: ModelSpec, groups: Groups, table: Host, dtype: Dtype) -> Attention:
    """The attention of an image's layers whose rows see each other as `groups` say, turned by `table`.

    table [rows of a tile, 2, head_dim / 2] f32: cosines and sines, or [1, 2, 0]. Imports torch where it goes by it: on
    GPUs, by the reference, and for heads that the native kernel is not built for.
    """
    if ops.attends_whole(spec.head_dim):
        return PagedAttention(ops, spec, groups, table, dtype)
    require_torch(f"a tower of images with heads of {spec.head_dim}, which 8 does not divide,", "train")
    from quire.model.vision.torch_attention import WholeAttention

    return WholeAttention(ops, spec, groups, table, dtype)
