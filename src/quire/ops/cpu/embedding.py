"""The CPU backend's side of the op `embedding`."""

from __future__ import annotations

from quire.ops.arrays import Host
from quire.ops.cpu.state import F32, I32, TABLES, Cpu, check
from quire.ops.op import impl
from quire.ops.weights import PackedTable


@impl("embedding", "cpu")
def embedding(cpu: Cpu, tokens: Host, table: Host | PackedTable, first: int | None = None) -> Host:
    rows = len(check(tokens, "embedding tokens", I32, -1))
    if isinstance(table, PackedTable):
        return _packed_rows(cpu, tokens, rows, table, first)
    vocabulary, d = check(table, "embedding table", table.dtype if table.dtype in TABLES else F32, -1, -1).shape
    out = cpu.arena.empty(rows, d)
    if rows:
        where, numbers = (out, tokens, table), TABLES.index(table.dtype)
        cpu.call("embedding", *where, rows, d, vocabulary, numbers, -1 if first is None else first)
    return out


def _packed_rows(cpu: Cpu, tokens: Host, rows: int, table: PackedTable, first: int | None) -> Host:
    out = cpu.arena.empty(rows, table.matrix.k)
    if rows:
        at, begin = table.matrix.handle.at, -1 if first is None else first
        cpu.call("embedding_packed", out, tokens, at, rows, int(table.rounded), begin)
    return out
