"""The CPU backend's side of the ops of states.py."""

from __future__ import annotations

import numpy as np

from quire.core.dtypes import F32, I32, I64
from quire.ops.arrays import Host
from quire.ops.attention_spec import AttentionSpec
from quire.ops.cpu.descriptor_cache import batch_descriptor, cache_descriptor
from quire.ops.cpu.layers import run_attention
from quire.ops.cpu.state import Cpu
from quire.ops.descriptors import AttentionDescriptor
from quire.ops.layout import KVCache
from quire.ops.native import check
from quire.ops.op import impl


@impl("attention_states", "cpu")
def attention_states(
    cpu: Cpu,
    qkv: Host,
    cache: KVCache,
    cu_q: Host,
    context: Host,
    block_tables: Host,
    starts: Host,
    spec: AttentionSpec,
) -> Host:
    check(starts, "attention_states starts", I64, len(qkv) + 1)
    return run_attention(cpu, qkv, cache, (cu_q, context, block_tables), spec, starts=starts)


@impl("fold_states", "cpu")
def fold_states(cpu: Cpu, states: Host, starts: Host, order: Host, heads: int, sinks: Host | None) -> Host:
    count, width = check(states, "fold_states states", F32, -1, -1).shape
    rows = len(check(starts, "fold_states starts", I64, -1)) - 1
    d, rest = divmod(width, heads)
    d -= 2
    if rest or d < 1 or rows < 0:
        raise ValueError(f"fold_states: rows of {width} numbers are not states of {heads} heads")
    if len(check(order, "fold_states order", I64, -1)) < int(starts[-1]):
        raise ValueError(f"fold_states: {len(order)} places for {int(starts[-1])} states")
    if sinks is not None:
        check(sinks, "fold_states sinks", F32, heads)
    out = cpu.arena.empty(rows, heads * d)
    if rows:
        where = out, states, starts, order, sinks
        cpu.call("fold_states", *where, rows, heads, d, count)
    return out


@impl("cache_rows", "cpu")
def cache_rows(cpu: Cpu, kv: Host, slots: Host, cache: KVCache) -> None:
    layout = cache.layout
    rows = check(kv, "cache_rows kv", F32, -1, 2 * layout.kv_heads * layout.head_dim).shape[0]
    check(slots, "cache_rows slots", I64, rows)
    at_cache = cache_descriptor(cpu, cache)
    if rows:
        cpu.call("cache_rows", kv, slots, at_cache, rows)


@impl("whole_attention", "cpu")
def whole_attention(cpu: Cpu, q: Host, cache: KVCache, context: Host, block_tables: Host, scale: float) -> Host:
    heads, d = cache.layout.kv_heads, cache.layout.head_dim
    sequences, each, _ = check(q, "whole_attention q", F32, -1, -1, heads * d).shape
    out = cpu.arena.empty(sequences * each, heads * d)
    # To the native op a sequence's rows are one token, its last, with as many queries for each head of keys.
    ends = np.arange(sequences + 1, dtype=I32)
    at_cache, batch = cache_descriptor(cpu, cache), batch_descriptor(cpu, "attention", (ends, context, block_tables))
    if out.size:
        spec = AttentionDescriptor(heads=each * heads, scale=scale, queries_only=1)
        cpu.call("attention", out, q, at_cache, batch, spec, sequences)
    return out
