"""The CPU backend's side of the op `embedding`."""

from __future__ import annotations

from torch import Tensor

from quire.ops.cpu import BF16, F32, I32, Cpu, check
from quire.ops.op import impl
from quire.ops.weights import PackedTable


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
    out = cpu.arena.empty(rows, table.matrix.k)
    if rows:
        at = table.matrix.handle.at
        cpu.call("embedding_packed", out.data_ptr(), tokens.data_ptr(), at, rows, int(table.rounded))
    return out
