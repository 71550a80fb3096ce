"""Descriptors of what layers and steps have in common: each is checked and filled in once, and then looked up.

What is fixed is described as long as it lives; the sequences of a step as long as the step.
"""

from __future__ import annotations

from functools import lru_cache

from quire.core.dtypes import BF16, F32, I32
from quire.ops.arrays import Host, address, byte_strides
from quire.ops.attention_spec import ALL, AttentionSpec
from quire.ops.cpu.state import ACTIVATION_NUMBERS, MOST_BATCHES, SCORE_NUMBERS, Cpu
from quire.ops.descriptors import (
    AttentionDescriptor,
    BatchDescriptor,
    BetweenDescriptor,
    CacheDescriptor,
    ExpertsDescriptor,
    LatentCacheDescriptor,
    RopeDescriptor,
    RoutingDescriptor,
)
from quire.ops.experts import Clamp, ExpertActivation, Grouped, Routing
from quire.ops.latents import rank_of
from quire.ops.layout import KVCache
from quire.ops.native import check

Paged = tuple[Host, Host, Host]
"""cu_q, context and block tables, as of `quire.model.batch.Batch`."""


def address_or_none(x: Host | None) -> int:
    """Where `x` lies; 0 for none."""
    return 0 if x is None else address(x)


def blocks_of(cache: KVCache) -> int:
    """The number of blocks of a cache that has the shape its layout says."""
    layout = cache.layout
    keys: Host = cache.keys
    values: Host = cache.values
    at_keys, at_values = layout.shapes(keys.shape[0])
    check(keys[0], "block of a key cache", layout.element, *at_keys[1:])
    check(values[0], "block of a value cache", layout.element, *at_values[1:])
    if not cache.paired:
        raise ValueError("keys and values are not of the same blocks")
    return len(keys)


def cache_descriptor(cpu: Cpu, cache: KVCache) -> CacheDescriptor:
    """Keys and values of a layer."""
    found = cpu.caches.get(cache)
    if found is not None:
        return found
    blocks, layout = blocks_of(cache), cache.layout
    made = cpu.caches[cache] = CacheDescriptor(
        keys=address(cache.keys), values=address(cache.values), kv_heads=layout.kv_heads, d=layout.head_dim,
        block_size=layout.block_size, blocks=blocks, format=layout.format, step=cache.step,
    )  # fmt: skip
    return made


def latent_cache_descriptor(cpu: Cpu, cache: KVCache) -> LatentCacheDescriptor:
    """A cache of latents."""
    found = cpu.latent_caches.get(cache)
    if found is not None:
        return found
    rank, blocks, layout = rank_of(cache), blocks_of(cache), cache.layout
    made = cpu.latent_caches[cache] = LatentCacheDescriptor(
        keys=address(cache.keys), values=address(cache.values), rank=rank, rope=layout.head_dim,
        block_size=layout.block_size, blocks=blocks, bf16=int(layout.dtype == BF16), key_step=cache.step,
        value_step=byte_strides(cache.values)[0],
    )  # fmt: skip
    return made


def batch_descriptor(
    cpu: Cpu, what: str, paged: Paged, tree: Host | None = None, starts: Host | None = None, states: int = 0
) -> BatchDescriptor:
    """The sequences of a step, the same for all layers that have these arrays; `states`: the room for them."""
    given = (*paged, tree, starts)
    key = (*map(id, given), states)
    found = cpu.batches.get(key)
    if found is not None:
        return found
    cu_q, context, block_tables = paged
    sequences = len(check(context, f"{what} context", I32, -1))
    check(cu_q, f"{what} cu_q", I32, sequences + 1)
    max_blocks = check(block_tables, f"{what} block_tables", I32, sequences, -1).shape[1]
    made = BatchDescriptor(
        cu_q=address(cu_q), context=address(context), tables=address(block_tables), tree=address_or_none(tree),
        starts=address_or_none(starts), sequences=sequences, max_blocks=max_blocks, states=states,
    )  # fmt: skip
    if len(cpu.batches) >= MOST_BATCHES:
        cpu.batches.clear()
    made.kept = given
    cpu.batches[key] = made
    return made


def attention_descriptor(cpu: Cpu, spec: AttentionSpec, heads: int) -> AttentionDescriptor:
    """How `heads` heads of queries attend."""
    by_heads = cpu.attention.setdefault(spec, {})
    found = by_heads.get(heads)
    if found is not None:
        return found
    for name, numbers in (("sinks", spec.sinks), ("alibi", spec.alibi)):
        if numbers is not None:
            check(numbers, f"attention {name}", F32, heads)
    distances = 0 if spec.bias is None else check(spec.bias, "attention bias", F32, heads, -1).shape[1]
    if spec.bias is not None and not distances:
        raise ValueError("attention bias: needs at least one distance")
    if not 0 <= spec.behind <= max(0, distances - 1) or not 0 <= spec.after <= ALL:
        raise ValueError(f"attention: {spec.behind} of {distances} distances and {spec.after} keys behind a row")
    made = by_heads[heads] = AttentionDescriptor(
        sinks=address_or_none(spec.sinks), alibi=address_or_none(spec.alibi), bias=address_or_none(spec.bias),
        distances=distances, behind=spec.behind, heads=heads, window=_within("attention window", spec.window),
        after=spec.after, scale=spec.scale, softcap=spec.softcap,
    )  # fmt: skip
    return made


def rope_descriptor(table: Host, heads: int, norms: tuple[Host | None, Host | None], eps: float) -> RopeDescriptor:
    """How `heads` heads of queries, and the keys, are normed and turned by table [positions, 2, half].

    `norms`: weights of a head of queries and of keys.
    """
    q_norm, k_norm = norms
    return RopeDescriptor(
        table=address(table), q_norm=address_or_none(q_norm), k_norm=address_or_none(k_norm),
        positions=table.shape[0], half=table.shape[2], heads=heads, eps=eps,
    )  # fmt: skip


def experts_descriptor(cpu: Cpu, w: Grouped) -> ExpertsDescriptor:
    """The matrices of a layer's experts."""
    found = cpu.experts.get(w)
    if found is None:
        found = cpu.experts[w] = ExpertsDescriptor(
            matrices=w.packed.handle.at, bias=address_or_none(w.bias), experts=w.experts, n=w.n
        )
    return found


@lru_cache(64)
def routing_descriptor(routing: Routing) -> RoutingDescriptor:
    """How a router chooses experts."""
    counts = {name: getattr(routing, name) for name in ("experts", "top_k", "groups", "top_groups", "group_best")}
    return RoutingDescriptor(
        **{name: _within(f"route {name}", count) for name, count in counts.items()},
        score=SCORE_NUMBERS[routing.score], renormalize=int(routing.renormalize),
        scale=routing.scale, jitter=routing.jitter,
    )  # fmt: skip


@lru_cache(64)
def between_descriptor(between: ExpertActivation) -> BetweenDescriptor:
    """What stands between the two matrices of an expert."""
    clamp = between.clamp or Clamp(0.0, 0.0)
    return BetweenDescriptor(
        activation=ACTIVATION_NUMBERS[between.kind], clamped=int(between.clamp is not None), alpha=clamp.alpha,
        limit=clamp.limit, shift=clamp.shift, most=clamp.limit if clamp.most is None else clamp.most,
    )  # fmt: skip


def _within(what: str, number: int) -> int:
    """`number`, which a field of 64 bits holds."""
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{what}: {number} does not fit in 64 bits")
    return number
