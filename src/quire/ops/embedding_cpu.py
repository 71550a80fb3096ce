"""The CPU backend's side of the op `embedding`."""

from __future__ import annotations

from torch import Tensor

from quire.ops.cpu import BF16, F32, I32, Cpu, check
from quire.ops.op import impl
from quire.ops.pack import take_apart
from quire.ops.weights import PackedTable

ROW_KINDS = ("f32", "bf16", "bf12", "fp8", "int8", "int4", "table4")
"""Kinds of packed matrices by their numbers in csrc/embedding.cpp."""


@impl("embedding", "cpu")
def embedding(cpu: Cpu, tokens: Tensor, table: Tensor | PackedTable) -> Tensor:
    rows = len(check(tokens, "embedding tokens", I32, -1))
    if isinstance(table, PackedTable):
        return _packed_rows(cpu, tokens, rows, table)
    vocabulary, d = check(table, "embedding table", F32 if table.dtype is F32 else BF16, -1, -1).shape
    out = cpu.arena.empty(rows, d)
    if rows:
        bf16 = int(table.dtype is BF16)
        cpu.call("embedding", out.data_ptr(), tokens.data_ptr(), table.data_ptr(), rows, d, vocabulary, bf16)
    return out


def _packed_rows(cpu: Cpu, tokens: Tensor, rows: int, table: PackedTable) -> Tensor:
    w = table.matrix
    out = cpu.arena.empty(rows, w.k)
    if rows:
        numbers, parts = take_apart(w)
        at = {name: part.data_ptr() for name, part in parts.items()}
        where = (at.get(name, 0) for name in ("codes", "scales", "zeros", "mins", "table", "order"))
        planes = parts["table"].numel() // 16 if "table" in parts else 0
        cpu.call(
            "embedding_packed", out.data_ptr(), tokens.data_ptr(), *where, rows, w.k, w.n, ROW_KINDS.index(w.kind),
            w.group, int(numbers.wide), planes, int(table.rounded),
        )  # fmt: skip
    return out
