"""Attention over a picture: each row sees all rows of its tile or window, itself and later ones included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.model.spec import ModelSpec
from quire.model.vision.account import PIECE
from quire.ops.backend import Ops
from quire.ops.layout import KVLayout

Groups = tuple[Tensor, ...]
"""Rows [groups, rows of each] int64 that see each other, groups of one size together; each row is in one group."""
BLOCK = 128
"""Rows of a block of keys, the most there may be: tables of blocks are short, and the last block wastes little."""


class Attention(Protocol):
    """The attention of one layer over all rows of a picture: all are written before any is asked for."""

    def write(self, rows: slice, qkv: Tensor) -> None:
        """Turn queries and keys of some rows, qkv [rows, 3 hidden], perhaps in place, and keep them and the values."""
        ...

    def attend(self) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Some rows and their softmax(q k^T) v [rows, hidden], valid until the next, until all were there.

        Memory of outputs is taken back before each, not after it.
        """
        ...


class PagedAttention:
    """By the kernel that decoders use, over blocks of keys and values, so that bits depend on no other row."""

    def __init__(self, ops: Ops, spec: ModelSpec, groups: Groups, table: Tensor, dtype: torch.dtype) -> None:
        self._ops, self._spec, self._groups = ops, spec, groups
        count, most = sum(g.numel() for g in groups), max(g.shape[1] for g in groups)
        size = min(BLOCK, 1 << max(most - 1, 15).bit_length())
        self._each, first = -(-most // size), 0
        self._slots = torch.empty(count, dtype=torch.int64)
        for rows in groups:
            start = (torch.arange(first, first + len(rows)) * self._each * size)[:, None]
            self._slots[rows] = start + torch.arange(rows.shape[1])
            first += len(rows)
        layout = KVLayout(size, spec.heads, spec.head_dim, dtype)
        self._cache = ops.allocate_cache(layout, first * self._each)
        self._positions, self._table = (torch.arange(count) % len(table)).int(), table
        self._q = torch.empty(count, spec.hidden)
        self._parts = tuple(self._parted())

    def _parted(self) -> Iterator[tuple[slice | Tensor, tuple[int, int], Tensor, int]]:
        """Rows that go into the op together: where they are, (groups, rows of each), the blocks and number of keys."""
        first = 0
        for rows in self._groups:
            blocks = torch.arange(first, first + len(rows) * self._each, dtype=torch.int32).view(len(rows), -1)
            first += blocks.numel()
            for queries in torch.tensor_split(rows, -(-rows.shape[1] // PIECE), 1):
                together = max(PIECE // queries.shape[1], 1)
                for some, tables in zip(torch.split(queries, together), torch.split(blocks, together), strict=True):
                    yield _where(some.flatten()), (len(some), some.shape[1]), tables, rows.shape[1]

    def write(self, rows: slice, qkv: Tensor) -> None:
        """Turn queries and keys of some rows, qkv [rows, 3 hidden], in place, and keep them and the values."""
        positions, slots = self._positions[rows], self._slots[rows]
        self._ops.rope_and_cache(qkv, positions, self._table, slots, self._cache, None, 1.0)
        self._ops.place_columns(self._q[rows], qkv[:, : self._spec.hidden], 0)

    def attend(self) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Some rows and their softmax(q k^T) v [rows, hidden] f32, until all were there."""
        for at, shape, tables, seen in self._parts:
            context = torch.full((shape[0],), seen, dtype=torch.int32)
            self._ops.begin_step()
            q = self._q[at].view(*shape, -1)
            yield at, self._ops.whole_attention(q, self._cache, context, tables, self._spec.attention_scale)


def _where(rows: Tensor) -> slice | Tensor:
    """Rows [n] int64 as a slice, whose copies are views, where they follow each other."""
    first, count = int(rows[0]), len(rows)
    return slice(first, first + count) if bool((rows.diff() == 1).all()) else rows


class WholeAttention:
    """By torch's kernel, all rows at once, in the dtype of the weights: where the other is not built for it."""

    def __init__(self, ops: Ops, spec: ModelSpec, groups: Groups, table: Tensor, dtype: torch.dtype) -> None:
        self._ops, self._spec, self._groups, self._table = ops, spec, groups, table.to(ops.device)
        count = sum(g.numel() for g in groups)
        self._qkv = torch.empty(3, spec.heads, count, spec.head_dim, dtype=dtype, device=ops.device)

    def write(self, rows: slice, qkv: Tensor) -> None:
        """Keep queries and keys of some rows, turned, and their values; qkv [rows, 3 hidden]."""
        heads = qkv.view(len(qkv), 3, self._spec.heads, self._spec.head_dim)
        if self._table.shape[2]:
            here = torch.arange(rows.start, rows.stop, device=qkv.device) % len(self._table)
            heads[:, :2] = rotate(heads[:, :2].float(), self._table[here])
        self._qkv[:, :, rows] = heads.permute(1, 2, 0, 3).to(self._qkv)

    def attend(self) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Some rows and their softmax(q k^T) v [rows, hidden], until all were there."""
        _, heads, count, head_dim = self._qkv.shape
        out = self._qkv.new_empty(count, heads, head_dim)
        for rows in self._groups:
            q, k, v = (part[:, rows].transpose(0, 1) for part in self._qkv)
            found = F.scaled_dot_product_attention(q, k, v, scale=self._spec.attention_scale)
            out[rows.flatten()] = found.transpose(1, 2).flatten(0, 1)
        flat = out.view(count, -1)
        for first in range(0, count, PIECE):
            some = slice(first, min(first + PIECE, count))
            self._ops.begin_step()
            yield some, flat[some] if flat.is_cuda else flat[some].float()


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """heads [rows, ..., head_dim] with pairs (i, i + head_dim / 2) turned by table [rows, 2, head_dim / 2]."""
    cos, sin = table.view(len(table), 2, *(1,) * (heads.dim() - 2), -1).unbind(1)
    a, b = heads.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attention_of(ops: Ops, spec: ModelSpec, groups: Groups, table: Tensor, dtype: torch.dtype) -> Attention:
    """The attention of a picture's layers whose rows see each other as `groups` say, turned by `table`.

    table [rows of a tile, 2, head_dim / 2] f32: cosines and sines, or [1, 2, 0].
    """
    paged = ops.cpu is not None and ops.chosen["attention"] == "cpu" and spec.head_dim % 8 == 0
    return (PagedAttention if paged else WholeAttention)(ops, spec, groups, table, dtype)
