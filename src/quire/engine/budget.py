"""How many KV blocks the machine has room for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.ops.runtime import Runtime

# Of the memory still available after the weights are loaded; the rest is for activations and the page cache.
FREE_MEMORY_SHARE = 0.5


def available_memory() -> int:
    """Bytes this process may still take: the machine's available memory, or what its control group leaves if less."""
    available = 8 << 30
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return max(0, available)


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


def plan_blocks(
    config: EngineConfig, bytes_per_token: int, max_position: int, left: int | None = None
) -> tuple[int, int]:
    """(number of blocks, max_model_len) for a model whose cache costs `bytes_per_token` over all layers.

    `left`: bytes for the cache where a device has memory of its own; a share of the host's free memory otherwise.
    ConfigError when a length that was asked for does not fit; an automatic length is cut to what fits.
    """
    cache, size = config.cache, config.cache.block_size
    asked = config.model.max_model_len
    if asked > max_position:
        raise ConfigError(
            f"--max-model-len {asked} exceeds the {max_position} positions the model was made for",
            param="max_model_len",
        )
    length = asked or max_position
    most = config.scheduler.max_num_seqs * -(-length // size)
    if cache.num_blocks:
        blocks = cache.num_blocks
    else:
        if left is None:
            left = int(available_memory() * FREE_MEMORY_SHARE)
        budget = cache.kv_cache_memory_bytes or left
        blocks = budget // (bytes_per_token * size)
        if not cache.kv_cache_memory_bytes:
            blocks = min(blocks, most)
    if blocks < 1:
        raise ConfigError(
            f"no room for one KV block of {bytes_per_token * size:,} bytes; lower --block-size or raise "
            "--kv-cache-memory-bytes",
            param="kv_cache_memory_bytes",
        )
    if asked and blocks * size < asked:
        raise ConfigError(
            f"--max-model-len {asked} needs {asked * bytes_per_token:,} bytes of KV cache, but only "
            f"{blocks * size * bytes_per_token:,} are there; lower it or raise --kv-cache-memory-bytes",
            param="max_model_len",
        )
    return blocks, min(length, blocks * size)
