"""The account of a rank's memory: weights, drafts, KV cache, a step's intermediates, graphs and the process itself.

Each term is what the engine allocates by: weights as packed (`weights.py`), blocks by `run.kv_budget`, the arena by
`run.activations`, arrays by `run.arrays`. Only `PROCESS` is a constant that was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from quire.core.config import EngineConfig
from quire.core.dtypes import BF16, F8, F16, F32, I8, Dtype
from quire.core.errors import ConfigError
from quire.core.machine import available_memory
from quire.model.describe import ModelFacts, compute_dtype, describe
from quire.model.disk.checkpoint import resolve
from quire.model.disk.hf_config import read_json
from quire.model.load.pipeline_stages import stages_of
from quire.model.load.roles import Share, local_spec
from quire.model.mixers.layer_mixers import format_of, layouts_of
from quire.model.offload.budget import allowed
from quire.model.vision.account import scratch_bytes
from quire.ops.choice import Choice, choose, choose_ops
from quire.plan.devices import DeviceSheet
from quire.plan.needs import drafting_model, drafting_weights, kv_shape, rank_share
from quire.plan.weights import WeightPart, weight_parts
from quire.run.activations import activations, feature_bytes
from quire.run.kv_budget import FREE_MEMORY_SHARE, KVPlan, check_asked, plan_kv
from quire.run.step_sizes import MAX_REPLAYED_ROWS, Sizes, graph_bytes, graph_sizes
from quire.store.hub import Hub, hub_of

PROCESS = 255 << 20
"""Bytes of an engine's process that holds no model: interpreter, torch, tokenizer.

Measured by `benchmarks/planning/planner.py`.
"""
CONTEXT = 600 << 20
"""Bytes that CUDA's context and libraries take of a GPU: assumed, not measured."""
RECORDING = 6500
"""Bytes of a recorded step, each layer: of 16 layers some 100 KB (`run.step_sizes.MAX_RECORDINGS`)."""
KEPT = {"float32": F32, "float16": F16, "bfloat16": BF16, "int8": I8, "float8_e4m3fn": F8}
"""Formats of numbers by name."""


@dataclass(frozen=True)
class RankNeeds:
    """What one rank keeps: its share of the model, and the parts of its weights. Equal for all ranks of a stage."""

    facts: ModelFacts
    share: Share
    parts: tuple[WeightPart, ...]

    @property
    def weights(self) -> int:
        """Bytes of them."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class MemoryAccount:
    """Bytes of one rank, the one that needs most. `there`: that the machine or device has for it."""

    weights: int
    drafts: int
    kv: int
    tables: int
    activations: int
    images: int
    graphs: int
    process: int
    there: int

    @property
    def total(self) -> int:
        """Total of everything."""
        return self.fixed + self.kv

    @property
    def fixed(self) -> int:
        """What no KV block takes."""
        steps = self.tables + self.activations + self.images + self.graphs
        return self.weights + self.drafts + steps + self.process


@lru_cache(maxsize=64)
def _facts(model: str, load_format: str, hub: Hub) -> tuple[ModelFacts, bool]:
    """Facts of a model, and whether there are no weights yet: of a config alone the shapes are those of its family."""
    folder = resolve(model, hub)
    bare = load_format != "dummy" and folder.is_dir() and not [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    if not bare or any(folder.glob("*.safetensors.index.json")):
        return describe(model, load_format, hub), False
    found = describe(model, "dummy", hub)
    raw = read_json(folder / "config.json")
    kept = KEPT.get(str(raw.get("torch_dtype") or raw.get("dtype")), BF16)
    if quantized := raw.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        note = f"config.json says that weights are quantized ({method}), which only the files tell in detail: counted "
        return replace(found, dtype=kept, notes=(*found.notes, note + "as unquantized; --quantization says more")), True
    return replace(found, dtype=kept), True


def facts_of(config: EngineConfig) -> tuple[ModelFacts, bool]:
    """Facts of `config.model` from headers, or from config.json alone (True then). Kept for calls that follow."""
    options = config.model
    found, bare = _facts(options.model, options.load_format, hub_of(options))
    return (replace(found, vision=None) if options.language_model_only else found), bare


def choice_of(config: EngineConfig, device: DeviceSheet | None) -> Choice:
    """What would run: here, or on a named device that need not be here."""
    if device is None:
        return choose(config.device)
    return Choice(device.backend, device.name, 1, choose_ops(device.backend, config.device.ops))


def rank_needs(config: EngineConfig, found: ModelFacts, choice: Choice) -> tuple[RankNeeds, ...]:
    """Needs of a rank of each stage. `ConfigError` where the model cannot be split so."""
    share, stages = rank_share(config), stages_of(config.parallel, found.spec)
    if len(stages) == 1:
        return (RankNeeds(found, share, tuple(weight_parts(config, found, choice, share))),)
    shares = [replace(share, layers=layers) for layers in stages]
    return tuple(RankNeeds(found, one, tuple(weight_parts(config, found, choice, one))) for one in shares)


def kv_format(config: EngineConfig, found: ModelFacts, choice: Choice) -> Dtype:
    """KV format of keys and values in the cache."""
    dtype, _ = compute_dtype(config.model.dtype, found.dtype)
    return format_of(layouts_of(found.spec, config.cache.kv_cache_dtype, dtype, choice.backend))


def account(
    config: EngineConfig,
    device: DeviceSheet | None,
    ranks: tuple[RankNeeds, ...],
    choice: Choice,
    process: int = PROCESS,
) -> tuple[MemoryAccount, KVPlan]:
    """The memory of the rank that needs most, and its KV cache, planned as the engine does.

    `ConfigError` where it does not fit, as the engine's start would refuse it.
    """
    found = ranks[0].facts
    most = max(ranks, key=lambda rank: rank.weights)
    drafts = drafting_model(config)
    shape, _ = kv_shape(config, found, choice, drafts)
    weights = most.weights
    if config.offload.from_file:
        weights = min(weights, allowed(config))
    if config.offload.fully_shard:  # each of the replicas has its part of the layers
        layers = sum(part.nbytes for part in most.parts if part.layers)
        weights += -(-layers // config.parallel.data_parallel_size) - layers
    there = available_memory() if device is None else round(device.memory * config.cache.gpu_memory_utilization)
    bare = MemoryAccount(
        weights=weights,
        drafts=drafting_weights(config, found, drafts, choice),
        kv=0,
        tables=_tables(config, shape),
        activations=_activations(config, most, choice, shape.max_model_len),
        images=_image_bytes(config, found, shape.max_model_len),
        graphs=_graphs(config, most, choice.backend == "triton"),
        process=CONTEXT if choice.backend == "triton" and device is not None else process,
        there=there // (config.wholes if device is None else 1),
    )
    kv = plan_kv(config, shape, _left(config, bare, shape, device))
    return replace(bare, kv=kv.blocks // kv.sizes.holders * kv.block_bytes + kv.states.nbytes), kv


def _left(config: EngineConfig, bare: MemoryAccount, shape: KVPlan, device: DeviceSheet | None) -> int:
    """Bytes for KV blocks: what a GPU's share leaves, and of a host's memory half of that, as the engine does."""
    left = bare.there - bare.fixed
    if left <= 0:
        raise ConfigError(
            f"{bare.fixed:,} bytes are needed beside the KV cache (weights {bare.weights + bare.drafts:,}) and "
            f"{bare.there:,} are there; quantize the model, use more ranks or a larger device",
            param="quantization",
        )
    check_asked(config, shape.block_bytes, left * (config.wholes if device is None else 1))
    return left if device is not None else round(left * FREE_MEMORY_SHARE)


def _tables(config: EngineConfig, shape: KVPlan) -> int:
    """The arrays of a step: block tables and what is said of each row."""
    rows = config.scheduler.rows(shape.max_model_len)
    sizes = Sizes(rows, config.scheduler.max_num_seqs, shape.sizes.entries(shape.max_model_len),
                  len(shape.groups.layers), states=bool(shape.states.slot_bytes))  # fmt: skip
    groups, seqs, blocks = sizes.tables
    return sizes.nbytes + 4 * groups * seqs * blocks


def _activations(config: EngineConfig, rank: RankNeeds, choice: Choice, length: int) -> int:
    spec, rows = local_spec(rank.facts.spec, rank.share), config.scheduler.rows(length)
    kinds = {part.kind for part in rank.parts if part.product and part.layers}
    integers = all(kind.startswith(("int", "table", "super")) for kind in kinds)
    floats = 4.0 if any(kind.startswith(("f32", "f16")) for kind in kinds) else 2.0
    # Codes have scales and sums beside them: 12 bytes for a group of 32.
    form = (1.0 + 12 / 32 if integers else floats) if choice.backend == "cpu" else 0.0
    gated = "gate" in rank.facts.roles or any(spec.moe.sparse)
    fused = gated and not config.lora.enable_lora and not any(kind.startswith(("table4", "fp8")) for kind in kinds)
    return activations(spec, rows, config.scheduler.max_num_seqs, form, fused).total


def _image_bytes(config: EngineConfig, found: ModelFacts, length: int) -> int:
    """Features, and the largest image while it is encoded."""
    if found.vision is None:
        return 0
    kept = config.scheduler.encoder_rows[1]
    return feature_bytes(found.spec, config.scheduler) + scratch_bytes(found.vision.tower, min(kept, length))


def _graphs(config: EngineConfig, rank: RankNeeds, on_gpu: bool) -> int:
    """Recorded steps: on a CPU each batch's own; on a GPU the graphs' logits and the pool of the largest one."""
    if config.device.enforce_eager:
        return 0
    spec, limits = local_spec(rank.facts.spec, rank.share), config.scheduler
    layers = len(rank.share.span(rank.facts.spec))
    if not on_gpu:
        return RECORDING * layers * min(limits.max_num_seqs, MAX_REPLAYED_ROWS)
    sizes = graph_sizes(limits.max_num_batched_tokens, limits.max_num_seqs)
    if not sizes:
        return 0
    return graph_bytes(sizes, spec.vocab_size) + activations(spec, sizes[-1], sizes[-1]).total // 2
