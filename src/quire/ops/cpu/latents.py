"""The CPU backend's side of the ops of mla.py."""

from __future__ import annotations

from quire.core.dtypes import BF16, F32, I32, I64
from quire.ops.arrays import Host
from quire.ops.cpu.state import Cpu
from quire.ops.latents import EPS, Heads, rank_of
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
        cpu.call("head_linear", out, x, w.handle.at, rows, heads, width // heads, n)
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
    heads: Heads,
) -> Host:
    rank, r = rank_of(cache), cache.layout.head_dim
    rows, width = check(q, "latent_rope_and_cache q", F32, -1, -1).shape
    check(kv, "latent_rope_and_cache kv", F32, rows, rank + r)
    check(positions, "latent_rope_and_cache positions", I32, rows)
    check(slots, "latent_rope_and_cache slots", I64, rows)
    check(table, "latent_rope_and_cache table", F32, -1, 2, r // 2)
    check(heads.norm, "latent_rope_and_cache norm", F32, rank)
    blocks, at_cache = _cache(cache)
    if width % heads.count:
        raise ValueError(f"latent_rope_and_cache: {width} columns are not {heads.count} heads")
    if rows:
        cpu.call(
            "latent_rope_and_cache", q, kv, positions, table,
            slots, *at_cache, heads.norm, rows, heads.count, width // heads.count, rank, r,
            table.shape[0],
            cache.layout.block_size, blocks, int(cache.layout.dtype == BF16), EPS,
        )  # fmt: skip
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
    scale: float,
) -> Host:
    rank = rank_of(cache)
    rows, width = check(latent, "latent_attention latent", F32, -1, -1).shape
    heads = width // rank
    if width % rank or q.shape[1] % max(heads, 1):
        raise ValueError(f"latent_attention: {width} and {q.shape[1]} columns are not heads of one number")
    check(q, "latent_attention q", F32, rows, -1)
    sequences = len(check(context, "latent_attention context", I32, -1))
    check(cu_q, "latent_attention cu_q", I32, sequences + 1)
    max_blocks = check(block_tables, "latent_attention block_tables", I32, sequences, -1).shape[1]
    blocks, at_cache = _cache(cache)
    out = cpu.arena.empty(rows, heads * rank)
    if rows:
        cpu.call(
            "latent_attention", out, latent, q, *at_cache, cu_q,
            context, block_tables, rows, sequences, heads, q.shape[1] // heads, rank,
            cache.layout.head_dim, cache.layout.block_size, blocks, max_blocks, int(cache.layout.dtype == BF16), scale,
        )  # fmt: skip
    return out


def _cache(cache: KVCache) -> tuple[int, tuple[Host, Host]]:
    """(number of blocks, (rotated keys, latents)) of a cache of latents."""
    layout = cache.layout
    keys: Host = cache.keys
    values: Host = cache.values
    check(keys, "rotated keys", layout.dtype, -1, layout.block_size, layout.head_dim)
    check(values, "latents", layout.dtype, len(keys), layout.block_size, rank_of(cache))
    return len(keys), (keys, values)
