"""The CPU backend's side of the ops of mla.py."""

from __future__ import annotations

from quire.core.dtypes import F32, I32, I64
from quire.ops.arrays import Host
from quire.ops.cpu.descriptor_cache import (
    address_or_none,
    batch_descriptor,
    latent_cache_descriptor,
    rope_descriptor,
)
from quire.ops.cpu.state import Cpu
from quire.ops.descriptors import AttentionDescriptor
from quire.ops.latents import LatentHeads, LatentReads, rank_of
from quire.ops.layout import KVCache
from quire.ops.native import check
from quire.ops.op import impl
from quire.ops.weights import Packed


@impl("head_linear", "cpu")
def head_linear(cpu: Cpu, x: Host, w: Packed, heads: int, n: int) -> Host:
    rows, width = check(x, "head_linear x", F32, -1, -1).shape
    if w.kind not in ("f32", "bf16") or width % heads or w.n != heads * (-(-n // 16) * 16):
        raise ValueError(f"head_linear: {w.kind} [{w.n}, {w.k}] is not {heads} matrices of {n} rows, padded to 16")
    out = cpu.arena.empty(rows, heads * n)
    if rows:
        cpu.call("head_linear", out, x, w.handle, rows, heads, width // heads, n)
    return out


@impl("latent_rope_and_cache", "cpu")
def latent_rope_and_cache(
    cpu: Cpu,
    q: Host,
    kv: Host,
    positions: Host,
    table: Host,
    slots: Host,
    cache: KVCache,
    heads: LatentHeads,
) -> Host:
    rank, r = rank_of(cache), cache.layout.head_dim
    rows, width = check(q, "latent_rope_and_cache q", F32, -1, -1).shape
    check(kv, "latent_rope_and_cache kv", F32, rows, rank + r)
    check(positions, "latent_rope_and_cache positions", I32, rows)
    check(slots, "latent_rope_and_cache slots", I64, rows)
    check(table, "latent_rope_and_cache table", F32, -1, 2, r // 2)
    check(heads.norm, "latent_rope_and_cache norm", F32, rank)
    at_cache = latent_cache_descriptor(cpu, cache)
    if width % heads.count:
        raise ValueError(f"latent_rope_and_cache: {width} columns are not {heads.count} heads")
    if rows:
        rope = rope_descriptor(table, heads.count, (None, heads.norm), heads.eps)
        cpu.call("latent_rope_and_cache", q, kv, positions, slots, at_cache, rope, rows, width // heads.count)
    return q


@impl("latent_attention", "cpu")
def latent_attention(
    cpu: Cpu,
    latent: Host,
    q: Host,
    cache: KVCache,
    cu_q: Host,
    context: Host,
    block_tables: Host,
    reads: LatentReads,
) -> Host:
    rank, chosen = rank_of(cache), reads.chosen
    rows, width = check(latent, "latent_attention latent", F32, -1, -1).shape
    heads = width // rank
    if width % rank or q.shape[1] % max(heads, 1):
        raise ValueError(f"latent_attention: {width} and {q.shape[1]} columns are not heads of one number")
    check(q, "latent_attention q", F32, rows, -1)
    batch = batch_descriptor(cpu, "latent_attention", (cu_q, context, block_tables))
    at_cache = latent_cache_descriptor(cpu, cache)
    most = 0 if chosen is None else check(chosen, "latent_attention chosen", I32, rows, -1).shape[1]
    if reads.sinks is not None:
        check(reads.sinks, "latent_attention sinks", F32, heads)
    out = cpu.arena.empty(rows, heads * rank)
    if rows:
        sinks = address_or_none(reads.sinks)
        spec = AttentionDescriptor(heads=heads, scale=reads.scale, sinks=sinks, window=reads.window, pool=reads.pool)
        cpu.call("latent_attention", out, latent, q, at_cache, batch, spec, chosen, rows, q.shape[1] // heads, most)
    return out
