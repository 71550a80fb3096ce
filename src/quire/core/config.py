"""One frozen tree of options; no environment variable changes what quire does.

Field names are the command line's. A value of "auto" or 0 means: decide from the model and the machine at load;
`quire inspect` shows what was decided.
"""

from __future__ import annotations

import os

import msgspec

from quire.core.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_DTYPES = ("auto", "bfloat16", "float16", "float32", "int8", "fp8")
KV_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "fp32": "float32",
    "f32": "float32",
    "fp8_e4m3": "fp8",
}
"""How others spell them."""
POLICIES = ("fcfs", "priority")
ACTIVATIONS = ("auto", "int8", "int16")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
DEVICES = ("auto", "cuda", "cpu", "reference")


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"--{name.replace('_', '-')} {value!r} is not one of {', '.join(allowed)}", param=name)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and how its numbers are kept."""

    model: str = ""
    tokenizer: str | None = None
    served_model_name: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    group_size: int = 32
    activations: str = "auto"
    max_model_len: int = 0
    load_format: str = "auto"
    cache_packed: str = "off"
    seed: int = 0
    chat_template: str | None = None
    generation_config: str = "auto"


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The paged KV cache. `kv_cache_memory_bytes` 0 = a share of the free memory; on a GPU, what its share has left."""

    block_size: int = 16
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int = 0
    gpu_memory_utilization: float = 0.9
    num_blocks: int = 0
    enable_prefix_caching: bool = True


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one step and of the queue. `async_scheduling`: plan a step while another runs; None = on a GPU."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    max_num_queued_reqs: int = 1024
    static_batching: bool = False
    async_scheduling: bool | None = None


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where ops run. `isa` forces a unit of the native extension, `ops` single implementations ("linear=reference")."""

    device: str = "auto"
    threads: int = 0
    isa: str = "auto"
    ops: tuple[str, ...] = ()
    enforce_eager: bool = False
    tune: str = "auto"
    bf16_bits: int = 16


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Low-rank adapters. `lora_modules`: "name=folder" of those loaded at start; `max_loras`: room for that many."""

    enable_lora: bool = False
    lora_modules: tuple[str, ...] = ()
    max_loras: int = 1
    max_lora_rank: int = 16


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine needs to start; crosses to the engine process as JSON."""

    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    cache: CacheConfig = msgspec.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)
    device: DeviceConfig = msgspec.field(default_factory=DeviceConfig)
    lora: LoraConfig = msgspec.field(default_factory=LoraConfig)

    def validate(self) -> None:
        """Refuse what cannot work, naming the option; the model-dependent checks come at load."""
        _choice("dtype", self.model.dtype, DTYPES)
        _choice("activations", self.model.activations, ACTIVATIONS)
        _choice("load_format", self.model.load_format, LOAD_FORMATS)
        _choice("kv_cache_dtype", self.cache.kv_cache_dtype, KV_DTYPES)
        _choice("scheduling_policy", self.scheduler.scheduling_policy, POLICIES)
        _choice("device", self.device.device, DEVICES)
        if self.device.bf16_bits not in (12, 16):
            raise ConfigError(f"--bf16-bits {self.device.bf16_bits} must be 12 or 16", param="bf16_bits")
        if not 0 < self.cache.gpu_memory_utilization <= 1:
            raise ConfigError("--gpu-memory-utilization must lie in (0, 1]", param="gpu_memory_utilization")
        size = self.cache.block_size
        if not (1 <= size <= 128 and size & (size - 1) == 0):
            raise ConfigError(f"--block-size {size} must be a power of two from 1 to 128", param="block_size")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs"):
            if getattr(self.scheduler, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1", param=name)
        if self.scheduler.max_num_batched_tokens < self.scheduler.max_num_seqs:
            raise ConfigError("--max-num-batched-tokens must be at least --max-num-seqs, or sequences would starve")
        if self.model.group_size not in (32, 64, 128):
            raise ConfigError(f"--group-size {self.model.group_size} must be 32, 64 or 128", param="group_size")
        if self.lora.lora_modules and not self.lora.enable_lora:
            raise ConfigError("--lora-modules needs --enable-lora", param="lora_modules")
        if not (1 <= self.lora.max_loras <= 1024 and 1 <= self.lora.max_lora_rank <= 512):
            raise ConfigError("--max-loras must lie in [1, 1024] and --max-lora-rank in [1, 512]", param="max_loras")
        if not 0 <= self.device.threads <= 1024:
            raise ConfigError(f"--threads {self.device.threads} must lie in [0, 1024]", param="threads")
        sizes = (self.model.max_model_len, self.cache.kv_cache_memory_bytes, self.cache.num_blocks)
        if min(sizes) < 0:
            raise ConfigError("--max-model-len, --kv-cache-memory-bytes and --num-blocks must not be negative")


def flat_config(**options: object) -> EngineConfig:
    """An `EngineConfig` from flat option names (`block_size=32`), as the CLI and `LLM` take them."""
    parts: dict[str, dict[str, object]] = {}
    sections = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "device": DeviceConfig,
                "lora": LoraConfig}  # fmt: skip
    for name, value in options.items():
        owner = next((s for s, t in sections.items() if name in t.__struct_fields__), None)
        if owner is None:
            raise ConfigError(f"unknown option {name!r}", param=name)
        if name == "kv_cache_dtype" and isinstance(value, str):
            value = KV_ALIASES.get(value, value)
        parts.setdefault(owner, {})[name] = value
    try:
        config = msgspec.convert(parts, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad option value: {error}") from None
    config.validate()
    return config


def cpu_set() -> set[int]:
    """CPUs this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cpu_count() -> int:
    """How many they are (hyper-threads are not told apart; `quire.core.machine` does)."""
    return len(cpu_set())
