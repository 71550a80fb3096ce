"""How many KV blocks the machine has room for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.cache.groups import LayerCache, LayerGroups, TableSizes, group_layers
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.machine import available_memory

if TYPE_CHECKING:
    from quire.ops.runtime import Runtime

# Of the memory still available after the weights are loaded; the rest is for activations and the page cache.
FREE_MEMORY_SHARE = 0.5
LEAST_SLOTS = 2
"""Of recurrent states: a step reads one, and writes another where that is a snapshot."""


def gpu_cache_bytes(runtime: Runtime, utilization: float, step: Callable[[], object]) -> int:
    """Bytes for the KV cache on a GPU: its share of the whole, less what is taken now and what `step` needs at most.

    `step` is the largest one; the model is loaded. `ConfigError` when nothing is left.
    """
    needed = runtime.peak(step)
    free, total = runtime.memory()
    left = int(total * utilization) - (total - free) - needed
    if left <= 0:
        raise ConfigError(
            f"--gpu-memory-utilization {utilization:g}: of {total:,} bytes, {total - free:,} are taken (this model and "
            f"other processes) and a step needs {needed:,}: nothing is left for the KV cache; raise it, lower "
            "--max-num-batched-tokens, or quantize the model",
            param="gpu_memory_utilization",
        )
    return left


STATE_SHARE = 0.5
"""Of the memory of the cache, for the states of all sequences that may run at most; and of what is left beside them,
for snapshots of states."""


@dataclass(frozen=True)
class StatePlan:
    """Recurrent states: how many slots there are, bytes of one, and tokens between snapshots (0: there are none)."""

    slots: int = 0
    slot_bytes: int = 0
    interval: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes


NO_STATES = StatePlan()
"""Layers keep tokens alone."""


@dataclass(frozen=True)
class KVPlan:
    """The KV cache: which layers share blocks, how many blocks there are, bytes of one, and the longest sequence.

    Of `blocks` each holder of `sizes` has its part, so many as the others.
    """

    groups: LayerGroups
    sizes: TableSizes
    blocks: int
    block_bytes: int
    max_model_len: int
    states: StatePlan = NO_STATES

    def bytes_held(self, tokens: int) -> int:
        """Bytes that a sequence of `tokens` tokens holds between steps."""
        return self.block_bytes * sum(self.sizes.kept(tokens, window) for window in self.sizes.windows)


def shape_kv(
    config: EngineConfig,
    parts: Mapping[int, LayerCache],
    max_position: int,
    groups: LayerGroups | None = None,
    state_bytes: int = 0,
) -> KVPlan:
    """The cache, yet without blocks, of what layers keep, `parts` by number of the layer, for at most `max_position`
    positions. `groups`: what rank 0 has, whose tables this one fills its own by. `state_bytes`: of the recurrent states
    of a sequence.

    `ConfigError` when more were asked for.
    """
    asked = config.model.max_model_len
    if asked > max_position:
        raise ConfigError(
            f"--max-model-len {asked} exceeds the {max_position} positions the model was made for",
            param="max_model_len",
        )
    length, size = asked or max_position, config.cache.block_size
    each = {layer: part.bytes_per_token for layer, part in parts.items()}
    groups = group_layers(parts, length) if groups is None else groups.share(each)
    sizes = TableSizes(size, config.scheduler.rows(length), groups.windows, config.parallel.context_parallel_size)
    stays = sum(part.bytes_per_token for part in parts.values() if not part.window) or sum(each.values())
    states = StatePlan(0, state_bytes, _interval(config, state_bytes, stays))
    return KVPlan(groups, sizes, 0, size * sum(each[layer] for layer in groups.widest), length, states)


def _interval(config: EngineConfig, state_bytes: int, token_bytes: int) -> int:
    """Tokens between snapshots of states, in whole blocks: so many as have the bytes of one, `token_bytes` each of
    what layers without a window keep."""
    cache = config.cache
    if not state_bytes or not cache.enable_prefix_caching:
        return 0
    tokens = cache.state_interval or -(-state_bytes // max(1, token_bytes))
    return -(-tokens // cache.block_size) * cache.block_size


def plan_states(config: EngineConfig, states: StatePlan, left: int, length: int) -> StatePlan:
    """Slots of states in `left` bytes of the cache: one for each sequence that may run, a spare one, which a sequence
    that begins with a snapshot needs beside it, and snapshots, no more than as many sequences of `length` tokens
    have."""
    if not states.slot_bytes:
        return states
    slots = config.cache.num_state_slots
    if not slots:
        running = min(config.scheduler.max_num_seqs + 1, int(left * STATE_SHARE) // states.slot_bytes)
        rest = max(0, left - running * states.slot_bytes)
        most = running * (1 + length // states.interval) if states.interval else 0
        slots = running + min(most, int(rest * STATE_SHARE) // states.slot_bytes)
    if slots < LEAST_SLOTS:
        raise ConfigError(
            f"no room for {LEAST_SLOTS} recurrent states of {states.slot_bytes:,} bytes{_each(config)}; raise "
            "--kv-cache-memory-bytes",
            param="kv_cache_memory_bytes",
        )
    return replace(states, slots=slots)


def check_asked(config: EngineConfig, block_bytes: int, free: int) -> None:
    """Refuse a size of the KV cache that was asked for and is more than the `free` bytes there are."""
    cache = config.cache
    name = "num_blocks" if cache.num_blocks else "kv_cache_memory_bytes"
    asked = -(-cache.num_blocks // config.parallel.context_parallel_size) * block_bytes or cache.kv_cache_memory_bytes
    free //= config.wholes
    if asked > free:
        fits = free // block_bytes * config.parallel.context_parallel_size
        raise ConfigError(
            f"--{name.replace('_', '-')} {getattr(cache, name)}: a KV cache of {asked:,} bytes{_each(config)}, and "
            f"{free:,} are free{_each(config)}; "
            f"{fits:,} blocks of {block_bytes:,} bytes fit: give at most {fits if cache.num_blocks else free}",
            param=name,
        )


def _each(config: EngineConfig) -> str:
    """Whose memory it is, where there are several ranks."""
    ranks, replicas = config.parallel.ranks, config.parallel.data_parallel_size
    of = f" of each of {replicas} engines" if replicas > 1 else ""
    return f" on each of {ranks} ranks{of}" if ranks > 1 else of


def plan_kv(config: EngineConfig, shape: KVPlan, left: int | None = None) -> KVPlan:
    """`shape` with as many blocks as there is room for.

    `left`: bytes for the cache where a device has memory of its own; a share of the host's free memory otherwise.
    ConfigError when a size or a length that was asked for does not fit; an automatic length is cut to what fits.
    """
    cache, sizes, block_bytes, length = config.cache, shape.sizes, shape.block_bytes, shape.max_model_len
    holders = sizes.holders
    if left is None and not (cache.num_blocks and not shape.states.slot_bytes):
        left = int(available_memory() * FREE_MEMORY_SHARE) // config.wholes
    left = cache.kv_cache_memory_bytes or left or 0
    states = plan_states(config, shape.states, left, length)
    if cache.num_blocks:
        blocks = cache.num_blocks
    else:
        blocks = max(0, left - states.nbytes) // block_bytes * holders
        if not cache.kv_cache_memory_bytes:
            blocks = min(blocks, config.scheduler.max_num_seqs * sizes.footprint(length))
    blocks = -(-blocks // holders) * holders
    if blocks < sizes.footprint(1):
        raise ConfigError(
            f"no room for {sizes.footprint(1)} KV blocks of {block_bytes:,} bytes{_each(config)}; lower --block-size "
            "or raise --kv-cache-memory-bytes",
            param="kv_cache_memory_bytes",
        )
    asked, fits = config.model.max_model_len, sizes.capacity(blocks, length)
    if asked and fits < asked:
        raise ConfigError(
            f"--max-model-len {asked} needs {sizes.footprint(asked) * block_bytes:,} bytes of KV cache{_each(config)}, "
            f"but only {blocks * block_bytes:,} are there; lower it or raise --kv-cache-memory-bytes",
            param="max_model_len",
        )
    return replace(shape, blocks=blocks, max_model_len=fits, states=states)
