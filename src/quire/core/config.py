"""One frozen tree of options; no environment variable changes what an engine does.

Field names are the command line's, which takes its help from here too. A value of "auto" or 0 means: decide from the
model and the machine at load; `quire inspect` shows what was decided.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import msgspec

from quire.core.cache_config import CacheConfig
from quire.core.cluster import ClusterConfig
from quire.core.errors import ConfigError
from quire.core.exclusions import features as feature
from quire.core.exclusions.features import Feature, found
from quire.core.exclusions.table import check_options
from quire.core.media import MediaConfig
from quire.core.offload import OffloadConfig, TierConfig
from quire.core.options.fields import about, common
from quire.core.options.values import check_values, read_options
from quire.core.parallel import ParallelConfig
from quire.core.speculation import Speculation, parse_speculation

DTYPES = ("auto", "bfloat16", "float16", "float32")
DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
}
USUAL_ROWS = 512
USUAL_SHARES = (0.9, 0.92)
"""Shares of a GPU's memory by default, quire's and vLLM's: given where there is no GPU, they ask for nothing."""
ENCODER_CACHE = 1 << 14
"""Rows of the largest image that the processors of the field let through: 16.8 million pixels, 32 x 32 a row."""
KV_ALIASES = DTYPE_ALIASES | {"fp8_e4m3": "fp8", "float8_e4m3fn": "fp8", "q8_0": "int8"}
"""How others spell them."""
POLICIES = ("fcfs", "priority", "fair")
ACTIVATIONS = ("auto", "int8", "int16")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
DEVICES = ("auto", "cuda", "cpu", "reference")
ISAS = ("auto", "amx", "avx512", "avx512vnni", "avxvnni", "avx2", "neon_i8mm", "neon", "portable")
QUANTIZATIONS = ("none", "int8", "int4", "nf4", "mxfp4", "fp8")
GROUP_SIZES = (32, 64, 128)
GENERATION_CONFIGS = ("auto", "vllm")
SPARSE = ("auto", "off", "on")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and how its numbers are kept.

    `seed` fixes the sequence of seeds that requests without one get; a server with 0 draws each at random.
    """

    model: Annotated[
        str,
        common(
            "Model to load: a folder, a GGUF file, or a name on the Hugging Face Hub. Without it, the bundled model.",
        ),
    ] = ""
    revision: Annotated[str | None, about("Branch, tag or commit of a model on the Hub.")] = None
    download_dir: Annotated[
        str | None, about("Folder for downloads from the Hub. By default the Hub client's cache.")
    ] = None
    tokenizer: Annotated[str | None, about("Folder of a tokenizer to use instead of the model's own.")] = None
    served_model_name: Annotated[
        tuple[str, ...], common("Name of the model in requests and replies. You can give it several times.")
    ] = ()
    dtype: Annotated[str, common("Number format of unquantized weights.", DTYPES)] = "auto"
    quantization: Annotated[
        str | None,
        common("Quantize 16-bit weights while they load. fp8 needs a GPU.", QUANTIZATIONS, open=True),
    ] = None
    group_size: Annotated[int, about("Number of columns that share one quantization scale.", GROUP_SIZES)] = 32
    activations: Annotated[
        str, about("Integer format of activations for quantized weights; auto = as the checkpoint says.", ACTIVATIONS)
    ] = "auto"
    max_model_len: Annotated[
        int,
        common("Longest sequence in tokens, prompt and output together; auto = the model's own limit.", ge=0),
    ] = 0
    load_format: Annotated[
        str, about("How to load weights; dummy = random weights in the shapes of config.json.", LOAD_FORMATS)
    ] = "auto"
    cache_packed: Annotated[
        str,
        about("Cache of converted weights for the next start: auto = in the user's cache folder, off, or a folder."),
    ] = "auto"
    cache_packed_gib: Annotated[
        float,
        about(
            "Largest size of that cache in GiB. The least recently used weights are deleted first.", ge=0, le=1 << 20
        ),
    ] = 64.0
    mmproj: Annotated[
        str | None,
        common(
            "File mmproj-*.gguf with the vision encoder of a GGUF model. By default the one in the model's folder.",
        ),
    ] = None
    language_model_only: Annotated[
        bool, about("Serve a vision-language model without its vision encoder, for text only.")
    ] = False
    seed: Annotated[int, about("Seed for requests that have no seed of their own.")] = 0
    chat_template: Annotated[
        str | None, common("File with a chat template (Jinja) to use instead of the model's own.")
    ] = None
    generation_config: Annotated[
        str, about("Sampling defaults: auto = the model's own, vllm = vLLM's.", GENERATION_CONFIGS)
    ] = "auto"


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one step and of the queue. `async_scheduling`: plan a step while another runs; None = on a GPU."""

    max_num_seqs: Annotated[int, common("Largest number of sequences in one step.", ge=1)] = 64
    max_num_batched_tokens: Annotated[int, common("Largest number of tokens in one step.", ge=1)] = USUAL_ROWS
    enable_chunked_prefill: Annotated[
        bool, about("Split long prompts into chunks, so that other sequences decode in the same steps.")
    ] = True
    scheduling_policy: Annotated[
        str,
        about(
            "Which request runs first: fcfs = first come, first served; priority = lower priority field "
            "first; fair = tenants by weight.",
            POLICIES,
        ),
    ] = "fcfs"
    max_num_queued_reqs: Annotated[
        int, about("Largest number of accepted, unfinished sequences. More get HTTP 429.", ge=1)
    ] = 1024
    target_itl_ms: Annotated[
        float,
        about(
            "Target for the time between tokens, in milliseconds: prompt chunks are sized so that a step "
            "takes no longer; 0 = no limit.",
            ge=0,
        ),
    ] = 0.0
    static_batching: Annotated[
        bool, about("Use static batches: admit no sequence while others run. A baseline for comparisons.")
    ] = False
    async_scheduling: Annotated[
        bool | None, about("Plan the next step while one runs. It needs a GPU, and is on if there is one.")
    ] = None
    max_num_encoder_tokens: Annotated[
        int,
        about(
            "Rows of images encoded in one step at most, one image at least; beside tokens that are waited for one "
            "image. 0 = as many as a step has tokens.",
            ge=0,
        ),
    ] = 0
    encoder_cache_tokens: Annotated[
        int, about("Image tokens whose features are cached for later prompts with the same images; 0 = 16,384.", ge=0)
    ] = 0

    @property
    def encoder_rows(self) -> tuple[int, int]:
        """Rows of images that a step encodes, and that are kept, at most."""
        return self.max_num_encoder_tokens or self.max_num_batched_tokens, self.encoder_cache_tokens or ENCODER_CACHE

    def rows(self, length: int) -> int:
        """Rows of the largest step where sequences have `length` tokens at most.

        Without chunked prefill the default makes room for them (as vLLM's does); another number stands.
        """
        whole = not self.enable_chunked_prefill and self.max_num_batched_tokens == USUAL_ROWS
        return max(USUAL_ROWS, length) if whole else self.max_num_batched_tokens


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where ops run. `isa` forces a unit of the native extension, `ops` single implementations ("linear=reference")."""

    device: Annotated[
        str,
        common(
            "cuda = GPU kernels, cpu = native kernels, reference = torch (slow), auto = the first that can run.",
            DEVICES,
        ),
    ] = "auto"
    threads: Annotated[
        int, common("CPU threads; 0 = one for each physical core within the CPU quota.", ge=0, le=1024)
    ] = 0
    isa: Annotated[str, about("Force an instruction set of the native kernels.", ISAS)] = "auto"
    ops: Annotated[
        tuple[str, ...],
        about("Choose the implementation of one op, for example linear=reference. You can give it several times."),
    ] = ()
    enforce_eager: Annotated[
        bool, about("Run each op separately. By default, decode steps are captured and replayed.")
    ] = False
    tune: Annotated[
        str,
        about(
            "Parameters of the native kernels: auto = measure on the first tokens and cache, off, or "
            "values such as ahead=1024,row_streams=4."
        ),
    ] = "auto"
    bf16_bits: Annotated[
        int, about("Bits of a bf16 weight in memory: 12 lose nothing and decode faster; 16 compute prompts faster.")
    ] = 16
    sparse: Annotated[
        str,
        about(
            "Store pruned weights without their zeros: auto = if one sequence decodes faster (CPU), off, "
            "on (GPU: 2:4 in 16 bits).",
            SPARSE,
        ),
    ] = "off"


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Low-rank adapters. `lora_modules`: "name=folder" of those loaded at start; `max_loras`: room for that many."""

    enable_lora: Annotated[bool, common("Make room for LoRA adapters.")] = False
    lora_modules: Annotated[
        tuple[str, ...],
        common(
            "LoRA adapter to load, as name=folder. Requests choose it by its name as their model. You can "
            "give it several times.",
        ),
    ] = ()
    max_loras: Annotated[
        int, about("Largest number of loaded adapters; at least as many as in --lora-modules.", ge=1, le=1024)
    ] = 1
    max_lora_rank: Annotated[int, about("Largest rank of an adapter.", ge=1, le=512)] = 16
    lora_extra_bytes: Annotated[
        int,
        about(
            "Bytes for all parts of adapters that are not low-rank matrices: output heads, embeddings, "
            "DoRA magnitudes, biases.",
            ge=0,
        ),
    ] = 256 << 20


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens guessed ahead and verified together; the output stays what it is without, bit for bit."""

    speculative_config: Annotated[
        str | None,
        common(
            'Guess tokens ahead, as JSON: {"method": "ngram"}, {"method": "self", "quantization": "int4"}, '
            '{"method": "draft_model", "model": FOLDER}, with "num_speculative_tokens": N and "adaptive": false.',
        ),
    ] = None
    speculative_model: Annotated[str | None, about("Folder of a draft model with the same vocabulary.")] = None
    num_speculative_tokens: Annotated[
        int | None, about("Largest number of tokens that --speculative-model drafts.")
    ] = None
    speculative_draft_tensor_parallel_size: Annotated[
        int | None,
        about("Ranks that share --speculative-model: 1, or the default, as many as the model has."),
    ] = None

    @property
    def asked(self) -> Speculation | None:
        """What they say together; `ConfigError` where that cannot be."""
        ranks = self.speculative_draft_tensor_parallel_size or 0
        return parse_speculation(self.speculative_config, self.speculative_model, self.num_speculative_tokens, ranks)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine needs to start; crosses to the engine process as JSON."""

    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    cache: CacheConfig = msgspec.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)
    device: DeviceConfig = msgspec.field(default_factory=DeviceConfig)
    lora: LoraConfig = msgspec.field(default_factory=LoraConfig)
    speculation: SpeculationConfig = msgspec.field(default_factory=SpeculationConfig)
    parallel: ParallelConfig = msgspec.field(default_factory=ParallelConfig)
    tiers: TierConfig = msgspec.field(default_factory=TierConfig)
    offload: OffloadConfig = msgspec.field(default_factory=OffloadConfig)
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)
    media: MediaConfig = msgspec.field(default_factory=MediaConfig)

    hosts: tuple[tuple[str, int], ...] = ()
    """Where the agents of all hosts listen: no option, but found out when an engine that needs several is started."""

    @property
    def processes(self) -> int:
        """Ranks of all engines that share this machine."""
        return max(1, self.parallel.processes // self.cluster.nnodes)

    @property
    def hosts_of_ranks(self) -> tuple[int, ...]:
        """The host of each rank of an engine whose first one is on this host."""
        return tuple(self.cluster.node_rank + rank // self.processes for rank in range(self.parallel.ranks))

    @property
    def wholes(self) -> int:
        """How many of them share what all layers take: a stage has but its own part of that."""
        return max(1, self.processes // self.parallel.pipeline_parallel_size)

    @property
    def features(self) -> frozenset[Feature]:
        """What is asked for, as far as it excludes something."""
        asked, parallel, model = self.speculation.asked, self.parallel, self.model
        drafts = frozenset[Feature]() if asked is None else asked.features
        staged, lora = parallel.pipeline_parallel_size > 1, self.lora
        alone = feature.DRAFT_MODEL in drafts and asked is not None and not parallel.drafts_everywhere(asked)
        own = found(
            (feature.QUANTIZATION, model.quantization not in (None, "none")),
            (feature.ACTIVATIONS, model.activations != "auto"),
            (feature.DUMMY, model.load_format == "dummy"),
            (feature.PACKED_FOLDER, model.cache_packed not in ("auto", "off")),
            (feature.NO_PREFIX_CACHE, not self.cache.enable_prefix_caching),
            (feature.GPU_SHARE, self.cache.gpu_memory_utilization not in USUAL_SHARES),
            (feature.ASYNC, bool(self.scheduler.async_scheduling)),
            (feature.TARGET_ITL, self.scheduler.target_itl_ms > 0),
            (feature.WHOLE_PROMPTS, not self.scheduler.enable_chunked_prefill),
            (feature.LORA, lora.enable_lora),
            (feature.NO_LORA, not lora.enable_lora),
            (feature.LORA_MODULES, bool(lora.lora_modules)),
            (feature.DRAFTS_BESIDE_STAGES, alone and staged),
            (feature.DRAFTS_ON_ONE_RANK, alone and not staged and parallel.ranks > 1),
        )
        sections = parallel, self.offload, self.cluster, self.tiers
        return own.union(drafts, *(section.features for section in sections))

    def validate(self) -> None:
        """Refuse what cannot work, naming the option; what model and device exclude is said once they are known."""
        for section in SECTIONS:
            check_values(getattr(self, section))
        self.parallel.validate(self.speculation.asked)
        self.media.validate()
        self.tiers.validate()
        self.cluster.validate()
        if self.device.bf16_bits not in (12, 16):
            raise ConfigError(f"--bf16-bits {self.device.bf16_bits} must be 12 or 16", param="bf16_bits")
        size = self.cache.block_size
        if not (1 <= size <= 128 and size & (size - 1) == 0):
            raise ConfigError(f"--block-size {size} must be a power of two from 1 to 128", param="block_size")
        if self.scheduler.max_num_batched_tokens < self.scheduler.max_num_seqs:
            raise ConfigError("--max-num-batched-tokens must be at least --max-num-seqs, or sequences would starve")
        check_options(self.features)
        self.cluster.check_hosts(self.parallel.processes, self.parallel.ranks)


SECTIONS: dict[str, type[msgspec.Struct]] = {
    field.name: field.type for field in msgspec.structs.fields(EngineConfig) if field.name != "hosts"
}


OWNER = {name: section for section, struct in SECTIONS.items() for name in struct.__struct_fields__}
"""Option -> the section of `EngineConfig` that has it."""


def flat_config(**options: object) -> EngineConfig:
    """An `EngineConfig` from flat option names (`block_size=32`), as the CLI and `LLM` take them."""
    parts: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
    for name, value in options.items():
        if name not in OWNER:
            raise ConfigError(f"unknown option {name!r}", param=name)
        aliases = {"dtype": DTYPE_ALIASES, "kv_cache_dtype": KV_ALIASES}.get(name)
        if aliases is not None and isinstance(value, str):
            value = aliases.get(value, value)
        if name == "served_model_name" and isinstance(value, str):
            value = (value,)
        parts[OWNER[name]][name] = value
    made: dict[str, Any] = {
        section: read_options(SECTIONS[section], given) for section, given in parts.items() if given
    }
    config = EngineConfig(**made)
    config.validate()
    return config


def cpu_set() -> set[int]:
    """CPUs this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cpu_count() -> int:
    """How many they are (hyper-threads are not told apart; `quire.core.machine` does)."""
    return len(cpu_set())
