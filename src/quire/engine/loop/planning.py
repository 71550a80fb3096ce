"""What a start decides before it allocates: the bounds of a step, and how many KV blocks there are."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from quire.core.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from quire.core.errors import ConfigError
from quire.core.machine import available_memory
from quire.core.speculation import LOOK_UPS
from quire.engine.loop.pictures import picture_bytes
from quire.model.build import Model
from quire.ops.backend import Ops
from quire.run.budget import FREE_MEMORY_SHARE, KVPlan, check_asked, gpu_cache_bytes, plan_kv, shape_kv
from quire.run.caches import parts_of
from quire.run.ranks import Ranks
from quire.run.runner import Runner
from quire.run.shapes import graph_bytes


@dataclass(frozen=True)
class Plan:
    """The KV cache, the bounds of a step, whether small steps are captured, and bytes of a token in all layers."""

    kv: KVPlan
    limits: SchedulerConfig
    capture: bool
    bytes_per_token: int


def make_plan(
    config: EngineConfig, model: Model, ops: Ops, beside: tuple[Model, ...] = (), ranks: Ranks | None = None
) -> Plan:
    """For a loaded model; on a GPU the largest steps are run to see what they take. `ConfigError` if it cannot be.

    `beside`: models that keep keys and values in the same blocks; `ranks`: the others, each with a GPU of its own.
    """
    parts = parts_of((model, *beside))
    capture = not config.device.enforce_eager
    shape = shape_kv(config, parts, model.max_model_len)
    check_asked(config, shape.block_bytes, ops.free_memory(config.wholes))
    kv = plan_kv(config, shape, _cache_bytes(config, model, ops, shape, beside, ranks))
    limits = _limits(config.scheduler, model, kv.max_model_len)
    check_limits(limits, kv.max_model_len)
    return Plan(kv, limits, capture, sum(part.bytes_per_token for part in parts.values()))


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
    """Those of steps. An encoder reads all of a prompt at once: none is cut, and a step has room for `length`."""
    if model.encoder is None:
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


def _cache_bytes(
    config: EngineConfig, model: Model, ops: Ops, shape: KVPlan, beside: tuple[Model, ...], ranks: Ranks | None
) -> int | None:
    """What each GPU has left for the KV cache; None on the host."""
    cache = config.cache
    limits = _limits(config.scheduler, model, shape.max_model_len)
    pictures = picture_bytes(limits, model, shape.max_model_len)
    if cache.kv_cache_memory_bytes or cache.num_blocks or not (ops.queues or pictures):
        return None
    if not ops.queues:
        return int(max(0, available_memory() - pictures) * FREE_MEMORY_SHARE) // config.wholes
    step = Runner(model, ops, shape, limits, not config.device.enforce_eager, beside).step
    if ranks is not None:
        ranks.profile(shape.max_model_len, limits)
    kept = pictures + graph_bytes(step.graph_sizes, model.spec.vocab_size)
    if step.graph_sizes:  # their memory is a pool of its own, beside that of the largest step
        kept += ops.runtime.peak(lambda: step.profile(step.graph_sizes[-1]))
    if model.adapters is not None:
        kept += model.adapters.extensions.left  # adapters may come while the engine runs
    left = gpu_cache_bytes(ops.runtime, cache.gpu_memory_utilization, step.profile) - kept
    return left if ranks is None else ranks.least(left, ops)
