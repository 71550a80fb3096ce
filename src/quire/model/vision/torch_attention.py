"""Attention over an image by torch's kernel. Who imports this imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.dtypes import Dtype
from quire.model.spec import ModelSpec
from quire.model.vision.account import PIECE
from quire.model.vision.patch_positions import Groups
from quire.ops.arrays import Array, Host, to_torch
from quire.ops.backend import Ops
from quire.ops.lazy import one_torch_thread, torch_dtype


class WholeAttention:
    """All rows at once, in the dtype of the weights. numpy's arrays and torch's have the same memory."""

    def __init__(self, ops: Ops, spec: ModelSpec, groups: Groups, table: Host, dtype: Dtype) -> None:
        self._ops, self._spec, self._groups = ops, spec, groups
        self._table, count = to_torch(ops.put(table)), sum(g.size for g in groups)
        shape = 3, spec.heads, count, spec.head_dim
        self._qkv = torch.empty(shape, dtype=torch_dtype(dtype), device=self._table.device)

    def write(self, rows: slice, qkv: Any) -> None:
        """Keep queries and keys of some rows, turned, and their values; qkv [rows, 3 hidden]."""
        with one_torch_thread():
            heads = to_torch(qkv).view(len(qkv), 3, self._spec.heads, self._spec.head_dim)
            if self._table.shape[2]:
                here = torch.arange(rows.start, rows.stop, device=heads.device) % len(self._table)
                heads[:, :2] = rotate(heads[:, :2].float(), self._table[here])
            self._qkv[:, :, rows] = heads.permute(1, 2, 0, 3).to(self._qkv)

    def attend(self) -> Iterator[tuple[slice, Array]]:
        """Some rows and their softmax(q k^T) v [rows, hidden], until all were there."""
        with one_torch_thread():
            flat = self._attended()
        for first in range(0, len(flat), PIECE):
            some = slice(first, min(first + PIECE, len(flat)))
            self._ops.begin_step()
            yield some, self._ops.put(flat[some] if flat.is_cuda else flat[some].float())

    def _attended(self) -> Tensor:
        """Attention of all rows, [rows, hidden]."""
        _, heads, count, head_dim = self._qkv.shape
        out = self._qkv.new_empty(count, heads, head_dim)
        for group in self._groups:
            rows = torch.from_numpy(group).to(out.device)
            q, k, v = (part[:, rows].transpose(0, 1) for part in self._qkv)
            found = F.scaled_dot_product_attention(q, k, v, scale=self._spec.attention_scale)
            out[rows.flatten()] = found.transpose(1, 2).flatten(0, 1)
        return out.view(count, -1)


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """heads [rows, ..., head_dim] with pairs (i, i + head_dim / 2) turned by table [rows, 2, head_dim / 2]."""
    cos, sin = table.view(len(table), 2, *(1,) * (heads.dim() - 2), -1).unbind(1)
    a, b = heads.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
