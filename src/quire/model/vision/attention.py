"""Attention over a picture: each row sees all rows of its tile or window, itself and later ones included."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.model.spec import ModelSpec
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops
from quire.ops.layout import KVLayout

Groups = tuple[Tensor, ...]
"""Rows [groups, rows of each] int64 that see each other, groups of one size together; each row is in one group."""
BLOCK = 256
"""Rows of a block of keys: tables of blocks stay short, and a group's last block wastes little."""


class Attention(Protocol):
    """The attention of one layer over all rows of a picture: all are written before any is asked for."""

    def write(self, rows: slice, qkv: Tensor) -> None:
        """Keep queries, keys and values [rows, 3 hidden] of some rows."""
        ...

    def __call__(self, rows: slice) -> Tensor:
        """softmax(q k^T) v [rows, hidden] of some rows."""
        ...


class PagedAttention:
    """By the op that decoders use, over blocks of keys and values: each row as a sequence of its own that ends with it.

    Rows that name the same blocks read them together, so that this costs what a prompt's attention does, and bits
    depend on no other row.
    """

    def __init__(self, ops: Ops, spec: ModelSpec, groups: Groups, table: Tensor, dtype: torch.dtype) -> None:
        self._ops, self._spec = ops, spec
        count, most = sum(g.numel() for g in groups), max(g.shape[1] for g in groups)
        size = min(BLOCK, 1 << max(most - 1, 15).bit_length())
        each, first = -(-most // size), 0
        self._q = torch.empty(count, spec.hidden)
        self._slots = torch.empty(count, dtype=torch.int64)
        self._context = torch.empty(count, dtype=torch.int32)
        self._tables = torch.empty(count, each, dtype=torch.int32)
        for rows in groups:
            start = (torch.arange(first, first + len(rows)) * each)[:, None]
            self._slots[rows] = start * size + torch.arange(rows.shape[1])
            self._context[rows] = rows.shape[1]
            self._tables[rows] = (start + torch.arange(each)).int()[:, None]
            first += len(rows)
        self._cache = ops.allocate_cache(KVLayout(size, spec.heads, spec.head_dim, dtype), first * each)
        self._attend = AttentionSpec(spec.attention_scale)
        self._ends = torch.arange(count + 1, dtype=torch.int32)
        self._table, self._positions = table, (torch.arange(count) % len(table)).int()
        self._still = torch.empty(len(table), 2, 0)

    def write(self, rows: slice, qkv: Tensor) -> None:
        """Turn queries and keys of some rows, qkv [rows, 3 hidden], in place, and keep them and the values."""
        positions, slots = self._positions[rows], self._slots[rows]
        self._ops.rope_and_cache(qkv, positions, self._table, slots, self._cache, None, 1.0)
        self._q[rows] = qkv[:, : self._spec.hidden]

    def __call__(self, rows: slice) -> Tensor:
        """softmax(q k^T) v [rows, hidden] f32 of some rows."""
        spec, q, positions = self._spec, self._q[rows], self._positions[rows]
        queries = self._ops.rope_queries(q, positions, self._still, 2 * spec.heads, spec.head_dim, None, 1.0)
        ends, context, tables = self._ends[: len(q) + 1], self._context[rows], self._tables[rows]
        found: Tensor = self._ops.attention(queries, self._cache, ends, context, tables, self._attend)
        return found


class WholeAttention:
    """By torch's kernel, all rows at once, in the dtype of the weights: where the other is not built for it."""

    def __init__(self, ops: Ops, spec: ModelSpec, groups: Groups, table: Tensor, dtype: torch.dtype) -> None:
        self._spec, self._groups, self._table = spec, groups, table.to(ops.device)
        count = sum(g.numel() for g in groups)
        self._qkv = torch.empty(3, spec.heads, count, spec.head_dim, dtype=dtype, device=ops.device)
        self._found: Tensor | None = None

    def write(self, rows: slice, qkv: Tensor) -> None:
        """Keep queries and keys of some rows, turned, and their values; qkv [rows, 3 hidden]."""
        heads = qkv.view(len(qkv), 3, self._spec.heads, self._spec.head_dim)
        if self._table.shape[2]:
            here = torch.arange(rows.start, rows.stop, device=qkv.device) % len(self._table)
            heads[:, :2] = rotate(heads[:, :2].float(), self._table[here])
        self._qkv[:, :, rows] = heads.permute(1, 2, 0, 3).to(self._qkv)
        self._found = None

    def __call__(self, rows: slice) -> Tensor:
        """softmax(q k^T) v [rows, hidden] of some rows."""
        if self._found is None:
            self._found = self._attend()
        return self._found[rows]

    def _attend(self) -> Tensor:
        _, heads, count, head_dim = self._qkv.shape
        out = self._qkv.new_empty(count, heads, head_dim)
        for rows in self._groups:
            q, k, v = (part[:, rows].transpose(0, 1) for part in self._qkv)
            found = F.scaled_dot_product_attention(q, k, v, scale=self._spec.attention_scale)
            out[rows.flatten()] = found.transpose(1, 2).flatten(0, 1)
        flat = out.view(count, -1)
        return flat if flat.is_cuda else flat.float()


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
