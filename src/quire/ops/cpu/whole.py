"""The CPU backend's side of the op of whole.py."""

from __future__ import annotations

import numpy as np

from quire.core.dtypes import F32, I32
from quire.ops.arrays import Host
from quire.ops.cpu.layers import call_attention
from quire.ops.cpu.state import Cpu
from quire.ops.layout import KVCache
from quire.ops.native import check
from quire.ops.op import impl


@impl("whole_attention", "cpu")
def whole_attention(cpu: Cpu, q: Host, cache: KVCache, context: Host, block_tables: Host, scale: float) -> Host:
    heads, d = cache.layout.kv_heads, cache.layout.head_dim
    sequences, each, _ = check(q, "whole_attention q", F32, -1, -1, heads * d).shape
    out = cpu.arena.empty(sequences * each, heads * d)
    # To the native op a sequence's rows are one token, its last, with as many queries for each head of keys.
    ends = np.arange(sequences + 1, dtype=I32)
    window, softcap, none, states, alone = 0, 0.0, None, 0, 1
    rest = window, scale, softcap, none, none, none, 0, none, none, states, alone
    return call_attention(cpu, out, q, cache, (ends, context, block_tables), each * heads, rest)
