"""From a model folder to a decoder: claim -> canonical roles -> shard -> fuse -> quantize -> pack, one layer at a time.

Peak memory is the packed model and one layer: weights are views of the mapped file until they are packed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.core.config import CacheConfig, EngineConfig
from quire.core.errors import ConfigError, ModelError
from quire.model.batch import Forward
from quire.model.borrowed.found import Borrowed, find_borrowed
from quire.model.borrowed.load import load_borrowed
from quire.model.checkpoint import Checkpoint, Source, float_dtype, resolve
from quire.model.claim import claim
from quire.model.dummy import DummyWeights
from quire.model.encoder import Encoder, check_encoder, load_encoder
from quire.model.families import read_spec
from quire.model.generation import GenerationDefaults, read_generation
from quire.model.gguf import GgufModel
from quire.model.hf_config import read_json
from quire.model.load import Loader, Progress
from quire.model.lora import Adapters, parse_modules
from quire.model.memory import kv_bytes_per_token
from quire.model.opened import Opened
from quire.model.packed_cache import packed_cache
from quire.model.place import placed
from quire.model.rewrite import Rewritten
from quire.model.roles import DISK_ROLES
from quire.model.rope import shared_tables
from quire.model.spec import ModelSpec
from quire.model.stacked import Stacked
from quire.ops.backend import Ops
from quire.ops.layout import KVLayout
from quire.ops.mla import LatentLayout
from quire.quant.base import Quantizer
from quire.quant.registry import detect, quantizer

log = logging.getLogger(__name__)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
KV_TYPES = DTYPES | {"float16": torch.float16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class ModelFacts:
    """What `describe` finds without reading a weight. Sizes in bytes, `dtype` as on disk, KV counted in bf16.

    `active_parameters`: less those of the experts a token does not take. `roles`: those the model has for certain.
    `matrix_bits`: bits that a number of a quantized matrix takes when loaded, 0 where it is kept unquantized.
    """

    name: str
    folder: Path
    spec: ModelSpec
    roles: tuple[str, ...]
    scheme: str
    matrix_bits: float
    dtype: str
    tensors: int
    parameters: int
    active_parameters: int
    bytes_on_disk: int
    kv_bytes_per_token: int
    generation: GenerationDefaults
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Model:
    """A decoder ready to run, and what the engine must know of it.

    `report`: role -> (kind, bytes over all layers). `generation_defaults`: names and values for `SamplingParams`.
    """

    name: str
    spec: ModelSpec
    decoder: Forward
    layouts: tuple[KVLayout, ...]
    max_model_len: int
    dtype: str
    weight_bytes: int
    report: dict[str, tuple[str, int]]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    generation_defaults: dict[str, float]
    folder: Path
    notes: tuple[str, ...]
    adapters: Adapters | None = None
    encoder: Encoder | None = None
    decoder_start: int = 0


def open_model(model: str, load_format: str = "auto", seed: int = 0) -> Opened:
    """Read config and headers of `model` (folder, GGUF file, hub name, "" = the embedded one), claim every tensor."""
    folder = resolve(model)
    gguf = GgufModel.open(folder) if folder.is_file() else None
    if gguf is not None:
        spec, family, config = gguf.read_spec()
    else:
        spec, family, config = read_spec(read_json(folder / "config.json"), str(folder / "config.json"))
    required = family.required_parts(config)
    source: Source
    if load_format == "dummy":
        source = DummyWeights(spec, family, required, seed)
    else:
        source = Rewritten(Checkpoint(folder), family.rewrites) if gguf is None else gguf.source()
    family = family.named_as(source.infos)
    if gguf is not None and load_format != "dummy":
        scheme, dtype = gguf.tensors.scheme, gguf.tensors.dtype
    else:
        if family.stacks:
            source = Stacked(source, family, spec.layers)
        scheme, dtype = detect(source.infos, config.child("quantization_config")), float_dtype(source.infos)
    notes = list(scheme.notes)
    if config.has("auto_map"):
        notes.append("auto_map in config.json is ignored: code from a model folder is never run")
    try:
        claimed = claim(source.infos, spec, family, required, scheme)
    except ModelError as error:
        raise ModelError(f"{folder}: {error.message}") from None
    return Opened(own_name(model, folder), folder, config, spec, family, source, scheme, claimed, dtype, tuple(notes))


def describe(model: str, load_format: str = "auto") -> ModelFacts:
    """Facts of `model` from config and headers alone; no weight is read."""
    borrowed = find_borrowed(resolve(model))
    if borrowed is not None:
        return _describe_borrowed(model, borrowed)
    opened = open_model(model, load_format)
    infos, routing = opened.source.infos, opened.spec.moe.routing
    total = opened.claim.parameters(infos, opened.scheme)
    routed = opened.claim.parameters(infos, opened.scheme, experts_only=True)
    return ModelFacts(
        name=opened.name,
        folder=opened.folder,
        spec=opened.spec,
        roles=opened.family.roles(opened.config),
        scheme=opened.scheme.name,
        matrix_bits=opened.scheme.bits_per_number,
        dtype=dtype_name(opened.dtype),
        tensors=len(infos),
        parameters=total,
        active_parameters=total - (routed // routing.experts * (routing.experts - routing.top_k) if routed else 0),
        bytes_on_disk=sum(i.nbytes for i in infos.values()),
        kv_bytes_per_token=kv_bytes_per_token(opened.spec, 2),
        generation=read_generation(opened.folder, opened.spec),
        notes=opened.notes,
    )


def _describe_borrowed(model: str, found: Borrowed) -> ModelFacts:
    infos = found.checkpoint.infos
    parameters = sum(int(torch.Size(i.shape).numel()) for i in infos.values())
    return ModelFacts(
        name=own_name(model, found.folder),
        folder=found.folder,
        spec=found.spec,
        roles=(),
        scheme="unquantized",
        matrix_bits=0,
        dtype=dtype_name(found.dtype),
        tensors=len(infos),
        parameters=parameters,
        active_parameters=parameters,
        bytes_on_disk=found.checkpoint.nbytes,
        kv_bytes_per_token=kv_bytes_per_token(found.spec, 2),
        generation=read_generation(found.folder, found.spec),
        notes=found.notes,
    )


def own_name(model: str, folder: Path) -> str:
    """A hub name as it was given, otherwise that of the folder or file."""
    return model if "/" in model and not Path(model).exists() else folder.stem if folder.is_file() else folder.name


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def compute_dtype(asked: str, on_disk: torch.dtype) -> tuple[torch.dtype, tuple[str, ...]]:
    """Dtype of unquantized weights, and a note when numbers change. "auto": f32 if the file is f32, else bf16."""
    if asked == "float16":
        raise ConfigError(
            "--dtype float16 is refused on CPU: there are no float16 dot products, and its range overflows where "
            "that of bfloat16 does not; use --dtype bfloat16 or float32",
            param="dtype",
        )
    wide = on_disk in (torch.float32, torch.float64)
    dtype = DTYPES.get(asked) or (torch.float32 if wide else torch.bfloat16)
    if dtype == torch.bfloat16 and on_disk == torch.float16:
        return dtype, (
            "float16 weights are kept as bfloat16: 8 instead of 11 significant bits; --dtype float32 keeps all",
        )
    return dtype, ()


def kv_layout(cache: CacheConfig, spec: ModelSpec, dtype: torch.dtype, layout: type[KVLayout] = KVLayout) -> KVLayout:
    """How a layer's keys and values lie; "auto" keeps them in `dtype`, that of the unquantized weights.

    `layout`: the backend's, for keys and values per head.
    """
    kept = KV_TYPES.get(cache.kv_cache_dtype, dtype)
    if not spec.mla.rank:
        return layout(cache.block_size, spec.kv_heads, spec.head_dim, kept)
    if kept not in DTYPES.values():
        raise ConfigError(
            f"--kv-cache-dtype {cache.kv_cache_dtype}: latents are kept in {' or '.join(DTYPES)}",
            param="kv_cache_dtype",
        )
    return LatentLayout(cache.block_size, 1, spec.mla.rope, kept, rank=spec.mla.rank)


def max_model_len(asked: int, spec: ModelSpec) -> int:
    """`--max-model-len`, 0 = what config.json gives; `ConfigError` when the positions cannot be computed faithfully."""
    if asked > spec.max_length:
        raise ConfigError(
            f"--max-model-len {asked} is more than this model's {spec.max_length} positions; use at most that",
            param="max_model_len",
        )
    return asked or spec.max_position


def load_model(config: EngineConfig, ops: Ops, progress: Progress | None = None) -> Model:
    """Load and pack `config.model`. `progress(done_bytes, total_bytes, what)` is called after every layer.

    `ModelError` for a folder that cannot be used, `ConfigError` for options that do not fit the model.
    """
    options = config.model
    target = quantizer(options.quantization)
    borrowed = find_borrowed(resolve(options.model))
    if borrowed is not None:
        return _load_borrowed(config, ops, borrowed, target)
    opened = open_model(options.model, options.load_format, options.seed)
    spec = opened.spec
    if spec.encoder.layers:
        check_encoder(config, ops, spec.family)
    dtype, notes = compute_dtype(options.dtype, opened.dtype)
    length = max_model_len(options.max_model_len, spec)
    if target is not None:
        check_groups(opened, target, options.group_size)
    layout = kv_layout(config.cache, spec, dtype, ops.layout)
    adapters = load_room(config, opened, ops.device)
    loader = Loader(opened, ops, dtype, target, options.group_size, progress, adapters, options.activations)
    loader.cache = cache = packed_cache(options, opened, ops, dtype, target)
    if cache is not None:
        cache.load(progress or (lambda done, total, what: None))
    ropes = shared_tables(spec.rope, length)
    made = loader.decoder(ropes)
    encoder = load_encoder(loader, made.embed, ropes[spec.rope[0]]) if spec.encoder.layers else None
    decoder: Forward = placed(made, ops.device)
    if cache is not None:
        cache.save()
    loader.count("rope", "f32", sum(t.nbytes for t in ropes.values()))
    if adapters is not None:
        loader.count("adapters", "f32", adapters.nbytes)
        for name, folder in parse_modules(config.lora.lora_modules).items():
            adapters.load(name, folder)
    notes = opened.notes + notes
    for note in notes:
        log.warning("%s: %s", opened.folder, note)
    generation = read_generation(opened.folder, spec)
    return Model(
        name=opened.name,
        spec=spec,
        decoder=decoder,
        layouts=(layout,) * spec.layers,
        max_model_len=length,
        dtype=dtype_name(dtype),
        weight_bytes=sum(size for _, size in loader.report.values()),
        report=loader.report,
        eos_token_ids=generation.eos_token_ids,
        bos_token_id=generation.bos_token_id,
        generation_defaults=generation.sampling,
        folder=opened.folder,
        notes=notes,
        adapters=adapters,
        encoder=encoder,
        decoder_start=generation.decoder_start,
    )


def _load_borrowed(config: EngineConfig, ops: Ops, found: Borrowed, target: Quantizer | None) -> Model:
    """A model by transformers' code; options that only the table's families have are refused."""
    options = config.model
    for given, name in (
        (config.lora.enable_lora, "enable_lora"), (options.load_format == "dummy", "load_format"),
        (options.cache_packed != "off", "cache_packed"), (options.activations != "auto", "activations"),
    ):  # fmt: skip
        if given:
            raise ConfigError(
                f"--{name.replace('_', '-')} needs a family of the table; {found.spec.family!r} runs by the code of "
                "transformers",
                param=name,
            )
    if ops.gpu is not None:
        raise ConfigError(f"--device cuda: {found.spec.family!r} runs by the code of transformers, on the CPU only")
    dtype, notes = compute_dtype(options.dtype, found.dtype)
    length = max_model_len(options.max_model_len, found.spec)
    layout = kv_layout(config.cache, found.spec, dtype)
    decoder, spec, layouts, report = load_borrowed(found, ops, dtype, target, options.group_size, layout)
    for note in (*found.notes, *notes):
        log.warning("%s: %s", found.folder, note)
    generation = read_generation(found.folder, spec)
    return Model(
        name=own_name(options.model, found.folder),
        spec=spec,
        decoder=decoder,
        layouts=layouts,
        max_model_len=length,
        dtype=dtype_name(dtype),
        weight_bytes=sum(size for _, size in report.values()),
        report=report,
        eos_token_ids=generation.eos_token_ids,
        bos_token_id=generation.bos_token_id,
        generation_defaults=generation.sampling,
        folder=found.folder,
        notes=(*found.notes, *notes),
    )


def load_room(config: EngineConfig, opened: Opened, device: torch.device) -> Adapters | None:
    """Room for LoRA adapters, or None when they were not asked for."""
    lora = config.lora
    if not lora.enable_lora:
        return None
    slots = max(lora.max_loras, len(lora.lora_modules))
    return Adapters(opened, slots, lora.max_lora_rank, config.scheduler.max_num_batched_tokens, device)


def check_groups(opened: Opened, target: Quantizer, group: int) -> None:
    """Refuse a group size before minutes of loading, naming the first matrix that it does not divide."""
    if set(opened.scheme.parts) != {"weight"}:
        raise ConfigError(
            f"--quantization {target.name}: {opened.folder} is quantized already ({opened.scheme.name}); leave it out",
            param="quantization",
        )
    for (role, _), parts in opened.claim.parts.items():
        if DISK_ROLES[role].kind == "linear" and not DISK_ROLES[role].wide:
            scheme = target.head if role == "head" else target
            scheme.check(parts["weight"], DISK_ROLES[role].shape(opened.spec)[1], group)
