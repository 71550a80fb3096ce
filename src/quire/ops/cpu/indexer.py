"""The CPU backend's side of the indexer's ops."""

from __future__ import annotations

import numpy as np

from quire.core.dtypes import BF16, F32, I32, I64
from quire.ops.arrays import Host, address
from quire.ops.cpu.descriptor_cache import Paged, batch_descriptor, rope_descriptor
from quire.ops.cpu.state import Cpu
from quire.ops.descriptors import CacheDescriptor
from quire.ops.entries import every_of
from quire.ops.indexer import EPS, BlockIndexer, Choice, PooledIndexer, index_dim, key_dim
from quire.ops.layout import KVCache
from quire.ops.native import check
from quire.ops.op import impl

FORMATS = (F32, BF16)


@impl("index_rope_and_cache", "cpu")
def index_rope_and_cache(
    cpu: Cpu, q: Host, k: Host, positions: Host, table: Host, slots: Host, cache: KVCache, heads: int
) -> Host:
    d, half = index_dim(cache), table.shape[2]
    rows = check(q, "index_rope_and_cache q", F32, -1, heads * d).shape[0]
    check(k, "index_rope_and_cache k", F32, rows, d)
    check(positions, "index_rope_and_cache positions", I32, rows)
    check(slots, "index_rope_and_cache slots", I64, rows)
    check(table, "index_rope_and_cache table", F32, -1, 2, half)
    at_cache = index_descriptor(cpu, cache)
    if rows:
        rope = rope_descriptor(table, heads, (None, None), EPS)
        cpu.call("index_rope_and_cache", q, k, positions, slots, at_cache, rope, rows)
    return q


@impl("choose_tokens", "cpu")
def choose_tokens(
    cpu: Cpu, q: Host, weights: Host, cache: KVCache, cu_q: Host, context: Host, block_tables: Host, choice: Choice
) -> Host:
    rows, heads = check(weights, "choose_tokens weights", F32, -1, -1).shape
    d = key_dim(cache, choice)
    check(q, "choose_tokens q", F32, rows, heads * d)
    batch = batch_descriptor(cpu, "choose_tokens", (cu_q, context, block_tables))
    at_cache = index_descriptor(cpu, cache)
    out = cpu.lasting(rows, choice.width, I32)
    if rows and (every := every_of(cache)) > 1:
        cpu.call("choose_entries", out, q, weights, at_cache, batch, rows, heads, choice.most, every)
    elif rows:
        cpu.call("choose_tokens", out, q, weights, at_cache, batch, rows, heads, choice.most, d, choice.pool)
    return out


@impl("pool_keys", "cpu")
def pool_keys(cpu: Cpu, k: Host, gates: Host, bias: Host, slots: Host, cache: KVCache, paged: Paged) -> None:
    pool, d = check(bias, "pool_keys bias", F32, -1, index_dim(cache) // 2).shape
    rows = check(k, "pool_keys k", F32, -1, d).shape[0]
    check(gates, "pool_keys gates", F32, rows, d)
    check(slots, "pool_keys slots", I64, rows)
    batch = batch_descriptor(cpu, "pool_keys", paged)
    at_cache = index_descriptor(cpu, cache)
    if rows:
        cpu.call("pool_keys", k, gates, bias, slots, at_cache, batch, rows, d, pool)


@impl("choose_blocks", "cpu")
def choose_blocks(
    cpu: Cpu, q: Host, cache: KVCache, cu_q: Host, context: Host, block_tables: Host, sizes: BlockIndexer
) -> tuple[Host, Host, Host]:
    d = index_dim(cache)
    rows, width = check(q, "choose_blocks q", F32, -1, -1).shape
    heads, per = width // d, sizes.size // cache.layout.block_size
    if width % d:
        raise ValueError(f"choose_blocks: {width} columns are not heads of {d} numbers")
    batch = batch_descriptor(cpu, "choose_blocks", (cu_q, context, block_tables))
    at_cache = index_descriptor(cpu, cache)
    tables, contexts = cpu.arena.empty(heads * rows, sizes.most * per, I32), cpu.arena.empty(heads, rows, I32)
    if rows:
        most = sizes.most, sizes.local
        cpu.call("choose_blocks", tables, contexts, q, at_cache, batch, rows, heads, sizes.size, *most)
    return tables, contexts, np.arange(rows + 1, dtype=I32)


@impl("choose_pooled", "cpu")
def choose_pooled(
    cpu: Cpu, q: Host, cache: KVCache, cu_q: Host, context: Host, block_tables: Host, sizes: PooledIndexer
) -> tuple[Host, Host, Host]:
    d = index_dim(cache)
    rows, width = check(q, "choose_pooled q", F32, -1, -1).shape
    heads, per = width // d, sizes.size // cache.layout.block_size
    if width % d:
        raise ValueError(f"choose_pooled: {width} columns are not heads of {d} numbers")
    batch = batch_descriptor(cpu, "choose_pooled", (cu_q, context, block_tables))
    at_cache = index_descriptor(cpu, cache)
    tables, contexts = cpu.arena.empty(rows, (sizes.most + 1) * per, I32), cpu.arena.empty(1, rows, I32)[0]
    if rows:
        cpu.call("choose_pooled", tables, contexts, q, at_cache, batch, rows, heads, sizes.size, sizes.most)
    return tables, contexts, np.arange(rows + 1, dtype=I32)


def index_descriptor(cpu: Cpu, cache: KVCache) -> CacheDescriptor:
    """A cache of index keys."""
    found = cpu.caches.get(cache)
    if found is not None:
        return found
    layout, keys = cache.layout, cache.keys
    if layout.dtype not in FORMATS:
        raise ValueError(f"index cache: keys are not kept as {layout.dtype}")
    check(keys[0], "block of index keys", layout.element, *layout.shapes(1)[0][1:])
    made = cpu.caches[cache] = CacheDescriptor(
        keys=address(keys), values=address(keys), kv_heads=1, d=layout.head_dim, block_size=layout.block_size,
        blocks=len(keys), format=layout.format, step=cache.step,
    )  # fmt: skip
    return made
