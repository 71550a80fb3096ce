"""The CPU backend's side of the ops of ngrams.py."""

from __future__ import annotations

from quire.core.dtypes import F32, I32, I64
from quire.ops.arrays import Host
from quire.ops.cpu.state import Cpu
from quire.ops.native import check
from quire.ops.ngrams import NgramHash
from quire.ops.op import impl


@impl("ngram_rows", "cpu")
def ngram_rows(cpu: Cpu, tokens: Host, before: Host, by: NgramHash) -> Host:
    rows = len(check(tokens, "ngram_rows tokens", I32, -1))
    width = check(before, "ngram_rows before", F32, rows, -1).shape[1]
    check(by.factors, "ngram_rows factors", I64, -1)
    check(by.tables, "ngram_rows tables", I64, 2, -1)
    out = cpu.arena.empty(rows, by.heads, I32)
    if rows:
        sizes = rows, width, by.tokens, by.heads, by.end
        cpu.call("ngram_rows", out, tokens, before, by.factors, by.tables, *sizes)
    return out.reshape(-1)


@impl("gate_values", "cpu")
def gate_values(cpu: Cpu, key: Host, query: Host, value: Host) -> Host:
    rows, h = check(value, "gate_values value", F32, -1, -1).shape
    width = check(key, "gate_values key", F32, rows, -1).shape[1]
    check(query, "gate_values query", F32, rows, width)
    if width % h:
        raise ValueError(f"gate_values: rows of {width} numbers are not streams of {h}")
    out = cpu.arena.empty(rows, width)
    if rows:
        cpu.call("gate_values", out, key, query, value, rows, h, width // h)
    return out
