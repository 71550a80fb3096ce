"""The CPU backend's side of the ops of entries."""

from __future__ import annotations

from quire.core.dtypes import BF16, F32, I32, I64
from quire.ops.arrays import Host, address
from quire.ops.cpu.descriptor_cache import Paged, address_or_none, batch_descriptor
from quire.ops.cpu.indexer import index_descriptor
from quire.ops.cpu.state import Cpu
from quire.ops.descriptors import EntryReadsDescriptor, LatentCacheDescriptor, PoolDescriptor
from quire.ops.entries import EntryReads, Pool, every_of
from quire.ops.indexer import index_dim
from quire.ops.layout import KVCache
from quire.ops.native import check
from quire.ops.op import impl


@impl("pool_entries", "cpu")
def pool_entries(
    cpu: Cpu, x: Host, slots: Host, rows: KVCache, entries: KVCache, paged: Paged, tables: Host, pool: Pool
) -> Host:
    count = check(x, "pool_entries x", F32, -1, index_dim(rows)).shape[0]
    check(slots, "pool_entries slots", I64, count)
    if pool.every != every_of(entries):
        raise ValueError(f"pool_entries: entries of {pool.every} tokens do not fit a cache of {every_of(entries)}")
    batch = batch_descriptor(cpu, "pool_entries", paged)
    beside = batch_descriptor(cpu, "pool_entries", (*paged[:2], tables))
    caches = index_descriptor(cpu, rows), index_descriptor(cpu, entries)
    if count:
        cpu.call(
            "pool_entries", x, slots, *caches, batch, beside, _pool_descriptor(cpu, pool, index_dim(entries)), count
        )
    return x


@impl("entry_attention", "cpu")
def entry_attention(
    cpu: Cpu, q: Host, cache: KVCache, entries: KVCache | None, paged: Paged, tables: Host, reads: EntryReads
) -> Host:
    d, chosen = index_dim(cache), reads.chosen
    rows, width = check(q, "entry_attention q", F32, -1, -1).shape
    heads = width // d
    if width % d:
        raise ValueError(f"entry_attention: {width} columns are not heads of {d} numbers")
    if reads.sinks is not None:
        check(reads.sinks, "entry_attention sinks", F32, heads)
    most = 0 if chosen is None else check(chosen, "entry_attention chosen", I32, rows, -1).shape[1]
    batch = batch_descriptor(cpu, "entry_attention", paged)
    beside = batch if entries is None else batch_descriptor(cpu, "entry_attention", (*paged[:2], tables))
    caches = _rows_descriptor(cpu, cache), _rows_descriptor(cpu, cache if entries is None else entries)
    out = cpu.arena.empty(rows, width)
    if rows:
        described = EntryReadsDescriptor(
            sinks=address_or_none(reads.sinks), heads=heads, window=reads.window,
            every=0 if entries is None else every_of(entries), most=most, scale=reads.scale,
        )  # fmt: skip
        cpu.call("entry_attention", out, q, *caches, batch, beside, described, chosen, rows)
    return out


def _pool_descriptor(cpu: Cpu, pool: Pool, d: int) -> PoolDescriptor:
    """How the rows of a layer become entries of d numbers."""
    found = cpu.pools.get(pool)
    if found is not None:
        return found
    check(pool.bias, "pool_entries bias", F32, -1, pool.series * d)
    check(pool.norm, "pool_entries norm", F32, d)
    positions, _, half = check(pool.table, "pool_entries table", F32, -1, 2, -1).shape
    made = cpu.pools[pool] = PoolDescriptor(
        bias=address(pool.bias), norm=address(pool.norm), table=address(pool.table), positions=positions, half=half,
        every=pool.every, series=pool.series, eps=pool.eps,
    )  # fmt: skip
    return made


def _rows_descriptor(cpu: Cpu, cache: KVCache) -> LatentCacheDescriptor:
    """A cache of rows that are keys and values, as latents whose keys have nothing else."""
    found = cpu.latent_caches.get(cache)
    if found is not None:
        return found
    index_descriptor(cpu, cache)  # checks it
    layout, at = cache.layout, address(cache.keys)
    made = cpu.latent_caches[cache] = LatentCacheDescriptor(
        keys=at, values=at, rank=layout.head_dim, rope=0, block_size=layout.block_size, blocks=len(cache.keys),
        bf16=int(layout.dtype == BF16), key_step=cache.step, value_step=cache.step,
    )  # fmt: skip
    return made
