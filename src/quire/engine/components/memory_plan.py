"""What a start decides before it allocates: the bounds of a step, and how many KV blocks there are."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from quire.core.cache_config import CacheConfig
from quire.core.config import EngineConfig, SchedulerConfig, SpeculationConfig
from quire.core.errors import ConfigError
from quire.core.machine import available_memory
from quire.core.speculation import LOOK_UPS
from quire.model.build import Model
from quire.run.activations import feature_bytes
from quire.run.caches import kept_by, state_bytes
from quire.run.executor import Executor
from quire.run.kv_budget import FREE_MEMORY_SHARE, KVPlan, check_asked, plan_kv, shape_kv

LEAST_ROWS = 2
"""Of a step, where layers have a recurrent state."""


@dataclass(frozen=True)
class MemoryPlan:
    """The KV cache, the bounds of a step, and bytes of a token in all layers."""

    kv: KVPlan
    limits: SchedulerConfig
    bytes_per_token: int


def make_memory_plan(executor: Executor) -> MemoryPlan:
    """Plan memory for loaded models; on a GPU the largest steps are run to see what they take. `ConfigError` if it
    cannot be."""
    config, model, ops = executor.config, executor.model, executor.ops
    kept = kept_by(executor.models)
    shape = shape_kv(config, kept, model.max_model_len, state_bytes=state_bytes(executor.models))
    check_asked(config, shape.block_bytes, ops.free_memory(config.wholes))
    kv = plan_kv(config, shape, _cache_bytes(executor, shape))
    limits = _limits(config.scheduler, model, kv.max_model_len)
    check_limits(limits, kv.max_model_len)
    if kv.states.slots and limits.max_num_batched_tokens < LEAST_ROWS:
        raise ConfigError(
            f"--max-num-batched-tokens must be at least {LEAST_ROWS} for a model with recurrent layers: a step runs a "
            "token again beside the next one",
            param="max_num_batched_tokens",
        )
    return MemoryPlan(kv, limits, sum(each.bytes_per_token for each in kept.values()))


def same_weights(one: EngineConfig, other: EngineConfig) -> bool:
    """Whether an engine of `one` is one of `other` once its cache, steps and look-ups are arranged anew.

    How keys and values lie is the model's, and ranks, stores of blocks and whatever drafts by a model are made at the
    start alone.
    """

    def fixed(config: EngineConfig) -> EngineConfig:
        cache = CacheConfig(block_size=config.cache.block_size, kv_cache_dtype=config.cache.kv_cache_dtype)
        return replace(config, cache=cache, scheduler=SchedulerConfig(), speculation=SpeculationConfig())

    asked = [config.speculation.asked for config in (one, other)]
    light = all(drafts is None or drafts.method in LOOK_UPS for drafts in asked)
    return light and fixed(one) == fixed(other) and one.parallel.processes == 1 and not one.tiers.any


def _limits(limits: SchedulerConfig, model: Model, length: int) -> SchedulerConfig:
    """Limits of steps. An encoder reads all of a prompt at once: none is cut, and a step has room for `length`."""
    if not model.reads_whole:
        return replace(limits, max_num_batched_tokens=limits.rows(length))
    room = max(limits.max_num_batched_tokens, length)
    return replace(limits, enable_chunked_prefill=False, max_num_batched_tokens=room)


def check_limits(limits: SchedulerConfig, length: int) -> None:
    """`ConfigError` for limits of a step that cannot be where sequences have up to `length` tokens."""
    if not limits.enable_chunked_prefill and limits.max_num_batched_tokens < length:
        raise ConfigError(
            f"without chunked prefill --max-num-batched-tokens ({limits.max_num_batched_tokens}) must be at least "
            f"--max-model-len ({length})",
            param="max_num_batched_tokens",
        )


def _cache_bytes(executor: Executor, shape: KVPlan) -> int | None:
    """What each GPU has left for the KV cache; None on the host, but beside images, whose memory is kept."""
    config, model = executor.config, executor.model
    limits = _limits(config.scheduler, model, shape.max_model_len)
    images, on_host = image_bytes(limits, model, shape.max_model_len), not executor.ops.queues
    if config.cache.kv_cache_memory_bytes or config.cache.num_blocks or (on_host and not images):
        return None
    if on_host:
        return int(max(0, available_memory() - images) * FREE_MEMORY_SHARE) // config.wholes
    return executor.profile(shape, limits, images)


def image_bytes(limits: SchedulerConfig, model: Model, length: int) -> int:
    """Bytes of features, and of the largest image while it is encoded, for sequences of `length` tokens."""
    if model.vision is None:
        return 0
    return feature_bytes(model.spec, limits) + model.vision.scratch(min(limits.encoder_rows[1], length))
