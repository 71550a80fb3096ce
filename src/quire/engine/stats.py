"""Statistics of an engine: each is one field, which says its type, how it adds over engines, and its metric.

Its value is counted where it comes about, and read in `Engine.stats`; the rest of the way up, it is named here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from quire.engine.stat_field import (
    COUNTER,
    GAUGE,
    Adding,
    by_place,
    counter,
    gauge,
    joined,
    largest,
    latest,
    mean,
    over_lives,
    over_replicas,
    summed,
    united,
)

HELD = Adding(largest, latest)
"""By a store, which is one folder for all replicas and outlives them."""


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a store behind the KV cache holds, and what became of blocks since the start."""

    blocks: Annotated[int, HELD, gauge("quire:kv_store_blocks", "Blocks in the folder behind the KV cache.")] = 0
    bytes: Annotated[int, HELD, gauge("quire:kv_store_bytes", "Bytes that they take.")] = 0
    written: Annotated[int, COUNTER, counter("quire:kv_store_written", "Blocks written there.")] = 0
    hits: Annotated[int, COUNTER, counter("quire:kv_store_hits", "Blocks that came back from there.")] = 0
    misses: Annotated[
        int,
        COUNTER,
        counter("quire:kv_store_misses", "Blocks that were to come back and were not there any more, or bad."),
    ] = 0
    bad: Annotated[int, COUNTER, counter("quire:kv_store_bad", "Blocks whose checksum or tokens were wrong.")] = 0
    dropped: Annotated[
        int, COUNTER, counter("quire:kv_store_dropped", "Blocks that were not kept, for want of time or room.")
    ] = 0


def kv_usage(stats: Any) -> float:
    """Used share of the KV blocks."""
    return float(stats.used_blocks / max(1, stats.total_blocks))


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one of several engines of a model: some of its `Stats`. `up`: false while it is started again, or
    is gone for good."""

    up: Annotated[bool, gauge("quire:replica_up", "1 while this engine of several answers.")] = True
    running: Annotated[int, gauge("quire:replica_running", "Sequences in its batch.")] = 0
    waiting: Annotated[int, gauge("quire:replica_waiting", "Sequences in its queue.")] = 0
    used_blocks: Annotated[int, gauge("quire:replica_kv_usage", "Used share of its KV blocks.", value=kv_usage)] = 0
    total_blocks: int = 0
    generation_tokens: Annotated[int, counter("quire:replica_generation_tokens", "Tokens it generated.")] = 0
    restarts: Annotated[int, counter("quire:replica_restarts", "Times it was started again.")] = 0

    @classmethod
    def of(cls, stats: Stats, up: bool) -> ReplicaStats:
        """Statistics of an engine of which all `stats` are known."""
        return cls(up=up, **{name: getattr(stats, name) for name in cls.__struct_fields__ if name != "up"})


def _stores(add: Callable[[Sequence[StoreStats]], StoreStats]) -> Callable[[Sequence[Stats], str], StoreStats | None]:
    """Adds the stores of those that have one."""

    def added(parts: Sequence[Stats], name: str) -> StoreStats | None:
        stores = [part.kv_store for part in parts if part.kv_store is not None]
        return add(stores) if stores else None

    return added


def _imbalance(parts: Sequence[Stats], name: str) -> float:
    """Pairs of the ranks that had most over the mean, of all pairs."""
    pairs = [sum(part.expert_pairs) for part in parts]
    if not any(pairs):
        return 1.0
    return sum(part.expert_imbalance * own for part, own in zip(parts, pairs, strict=True)) / sum(pairs)


NOW = Adding(united, latest)
"""Names of what is in use."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics after a step.

    `step_tokens`, `step_seconds`: rows and time of the last one. `running_adapters`, `waiting_adapters`: names of LoRA
    adapters that sequences in the batch and in the queue use. `replicas`: each of several engines, where there are
    several; whoever adds them makes it.
    """

    running: Annotated[int, GAUGE, gauge("vllm:num_requests_running", "Sequences in the batch.")] = 0
    waiting: Annotated[int, GAUGE, gauge("vllm:num_requests_waiting", "Sequences in the queue.")] = 0
    used_blocks: Annotated[
        int, GAUGE, gauge("vllm:kv_cache_usage_perc", "Used share of the KV blocks, 1 = all.", value=kv_usage)
    ] = 0
    total_blocks: Annotated[int, Adding(summed, latest, stays=True)] = 0
    preemptions: Annotated[int, COUNTER, counter("vllm:num_preemptions", "Sequences preempted.")] = 0
    prefix_queries: Annotated[
        int, COUNTER, counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
    ] = 0
    prefix_hits: Annotated[
        int, COUNTER, counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
    ] = 0
    prompt_tokens: Annotated[int, COUNTER, counter("vllm:prompt_tokens", "Prompt tokens processed.")] = 0
    generation_tokens: Annotated[int, COUNTER, counter("vllm:generation_tokens", "Tokens generated.")] = 0
    drafts: Annotated[int, COUNTER, counter("vllm:spec_decode_num_drafts", "Drafts verified.")] = 0
    draft_tokens: Annotated[int, COUNTER, counter("vllm:spec_decode_num_draft_tokens", "Draft tokens proposed.")] = 0
    accepted_tokens: Annotated[
        int, COUNTER, counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
    ] = 0
    accepted_per_pos: Annotated[
        tuple[int, ...],
        Adding(by_place, by_place),
        counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by their position in the draft.",
            label="position",
        ),
    ] = ()
    waste: Annotated[
        float,
        Adding(mean, latest),
        gauge("quire:kv_waste_ratio", "Share of reserved KV slots that hold no token."),
    ] = 0.0
    cached_blocks: Annotated[
        int, GAUGE, gauge("quire:kv_cached_blocks", "KV blocks that a prefix can hit, used or free.")
    ] = 0
    steps: Annotated[int, COUNTER, counter("quire:engine_steps", "Engine steps.")] = 0
    step_tokens: Annotated[int, GAUGE] = 0
    step_seconds: Annotated[float, Adding(largest, latest)] = 0.0
    # Whoever starts engines counts them.
    restarts: Annotated[
        int,
        Adding(summed, latest, stays=True),
        counter("quire:engine_restarts", "Engines that were started after one died."),
    ] = 0
    numeric_errors: Annotated[
        int, COUNTER, counter("quire:numeric_errors", "Rows that ended because of NaN or infinity.")
    ] = 0
    bubbles: Annotated[
        tuple[float, ...],
        Adding(joined, latest),
        gauge(
            "quire:pipeline_bubble_ratio",
            "Share of the time of steps that a rank of a pipeline waited for others, since the start.",
            label="rank",
            needs="bubbles",
        ),
    ] = ()
    replicas: Annotated[tuple[ReplicaStats, ...], Adding(joined, latest)] = ()
    kv_store: Annotated[StoreStats | None, Adding(_stores(over_replicas), _stores(over_lives))] = None
    expert_imbalance: Annotated[
        float,
        Adding(_imbalance, _imbalance),
        gauge("quire:expert_imbalance", "Pairs of the rank that had most, over the mean.", needs="expert_pairs"),
    ] = 1.0
    expert_pairs: Annotated[
        tuple[int, ...],
        Adding(joined, by_place),
        counter("quire:expert_pairs", "Pairs of a token and an expert it chose.", label="rank", needs="expert_pairs"),
    ] = ()
    image_queries: Annotated[
        int, COUNTER, counter("vllm:mm_cache_queries", "Images that prompts came to.", needs="takes_images")
    ] = 0
    image_hits: Annotated[
        int, COUNTER, counter("vllm:mm_cache_hits", "Images that were encoded already.", needs="takes_images")
    ] = 0
    running_adapters: Annotated[tuple[str, ...], NOW] = ()
    waiting_adapters: Annotated[tuple[str, ...], NOW] = ()
