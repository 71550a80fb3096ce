"""Builds a decoder from a model folder: claim -> canonical roles -> shard -> fuse -> quantize -> pack, one layer at a
time.

Peak memory is the packed model and one layer: weights are views of the mapped file until they are packed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from quire.core.cache_config import CacheConfig
from quire.core.config import EngineConfig
from quire.core.dtypes import Dtype
from quire.core.exclusions.exclusion import NOTHING, Known
from quire.core.exclusions.features import BORROWED, IN_PROCESS
from quire.core.exclusions.table import check_known
from quire.core.files import LoadProgress
from quire.core.pooling import NO_VECTORS, Pooling
from quire.model.batch import Forward, Vision
from quire.model.describe import compute_dtype, describe, max_model_len, open_model, own_name
from quire.model.disk.checkpoint import resolve
from quire.model.disk.generation import read_generation
from quire.model.disk.headers import ModelHeaders
from quire.model.disk.hf_config import read_json
from quire.model.families.rope import Rope, shared_tables, short_reach
from quire.model.families.text_parts import parts_left_out
from quire.model.known import known_of, known_of_device
from quire.model.load.adapter_extension import Base
from quire.model.load.adapters import Adapters, parse_modules
from quire.model.load.audio_encoder import load_audio_encoder, read_by_another
from quire.model.load.builders import load_decoder
from quire.model.load.classifier import load_classifier
from quire.model.load.encoder import load_encoder
from quire.model.load.packed_cache import packed_cache
from quire.model.load.packed_writing import Writing
from quire.model.load.parallel_decoder import parallel_decoder, parallel_encoder, share_of, step_of
from quire.model.load.pipeline_stages import stages_of
from quire.model.load.reader import MatrixForm, WeightReader
from quire.model.load.roles import DISK_ROLES, Share, local_spec
from quire.model.mixers.layer_mixers import layouts_of, states_of
from quire.model.net.audio_encoder import AudioEncoder
from quire.model.net.decoder import Decoder
from quire.model.net.encoder import Encoder
from quire.model.offload.choose import keeper
from quire.model.offload.shared_host import Shards
from quire.model.pooled_head import PooledHead
from quire.model.spec import ModelSpec
from quire.model.transformers_backend.detect import TransformersModel, find_borrowed
from quire.ops.arrays import AnyArray
from quire.ops.backend import Ops
from quire.ops.layout import CacheLayout, StateLayout
from quire.ops.lazy import require_torch, torch_dtype
from quire.parallel.rank_place import ALONE, RankPlace
from quire.quant.base import Quantizer, QuantScheme
from quire.quant.registry import DENSE, quantizer
from quire.store.hub import hub_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A decoder ready to run, and what the engine must know of it.

    `quantization`: the format of its matrices, "none" for plain numbers.
    `report`: role -> (kind, bytes over all layers). `generation_defaults`: names and values for `SamplingParams`.
    `classifier`: layers behind pooled rows, on the host. `writing`: the packed cache that is being
    written. `span`: the layers of one stage, None: all. `place`: where this process is among those that run the model.
    `vision`: what makes rows of images, if it takes any. `known`: what it and the device are, to be asked what they
    exclude. `states`: how recurrent states of layers lie, none where no layer has any.
    """

    name: str
    spec: ModelSpec
    decoder: Forward
    layouts: tuple[CacheLayout, ...]
    max_model_len: int
    dtype: str
    quantization: str
    weight_bytes: int
    report: dict[str, tuple[str, int]]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    generation_defaults: dict[str, float]
    folder: Path
    notes: tuple[str, ...]
    adapters: Adapters | None = None
    encoder: Encoder | AudioEncoder | None = None
    decoder_start: int = 0
    writing: Writing | None = None
    place: RankPlace = ALONE
    span: range | None = None
    pooling: Pooling = NO_VECTORS
    classifier: PooledHead = ()
    vision: Vision | None = None
    known: Known = NOTHING
    states: tuple[StateLayout | None, ...] = ()

    @property
    def reads_whole(self) -> bool:
        """Whether every token of a prompt changes all of its keys, so that prompts are neither cut nor shared."""
        return self.encoder is not None or self.spec.bidirectional

    @cached_property
    def short_reach(self) -> int:
        """Tokens up to which a sequence turns as a short one, at positions shifted by `max_model_len`; 0: all alike."""
        return short_reach(self.spec.rope, self.max_model_len)

    @property
    def mmproj(self) -> Path | None:
        """The file of what makes rows of images, where it is not one of the decoder's."""
        return None if self.vision is None else self.vision.file

    @property
    def own(self) -> range:
        """The layers that it has itself."""
        return range(self.spec.layers) if self.span is None else self.span

    @property
    def own_states(self) -> tuple[StateLayout | None, ...]:
        """How the recurrent states of its own layers lie."""
        return tuple(self.states[layer] if self.states else None for layer in self.own)


def kv_layouts(cache: CacheConfig, spec: ModelSpec, dtype: Dtype, ops: Ops) -> tuple[CacheLayout, ...]:
    """How each layer's cache lies."""
    return layouts_of(spec, cache.kv_cache_dtype, dtype, ops.name, cache.block_size, ops.layout)


def load_model(
    config: EngineConfig,
    ops: Ops,
    progress: LoadProgress | None = None,
    place: RankPlace = ALONE,
    shards: Shards | None = None,
    encoder: AudioEncoder | None = None,
) -> Model:
    """Load and pack the share of `config.model` that a rank at `place` has, joined with those of other ranks.

    `progress(done_bytes, total_bytes, what)` is called after every layer. `shards`: memory that replicas share.
    `encoder`: of another model, with the same weights. `ModelError`, `ConfigError` where folder or options do not fit.
    """
    options = config.model
    if (borrowed := find_borrowed(resolve(options.model, hub_of(options)))) is not None:
        return _load_borrowed(config, ops, borrowed, quantizer(options.quantization), _where(config, ops, shards))
    opened = _opened(config)
    check_known(config.features, known := known_of(config, opened) | _where(config, ops, shards))
    spec, target = opened.spec, quantizer(options.quantization, opened.stored)
    asked, notes = compute_dtype(options.dtype, opened.dtype)
    share = share_of(place, stages_of(config.parallel, spec), step_of(opened, target, options.group_size))
    length = max_model_len(options.max_model_len, spec, opened.pooling.longest)
    check_groups(opened, target, options.group_size)
    layouts = kv_layouts(config.cache, local_spec(spec, share), asked, ops)
    reader = _reader(config, opened, ops, form_of(config, asked, target), share, progress)
    reader.keeper = keeper(config, opened, ops, shards)
    own = load_decoder(reader, ropes := _ropes(reader, length))
    made = parallel_decoder(own, spec, place, share, config.parallel)
    heard = _encoder(reader, made, ropes[spec.rope[0]], encoder)
    vision = None if place.rank else _vision(reader, asked)  # other ranks are told what it makes
    load_adapters(config, reader, Base(ops, spec, own.embed, reader.whole, asked, share))
    _warn(opened.folder, notes := opened.notes + notes)
    generation = read_generation(opened.folder, spec)
    return Model(
        name=opened.name,
        spec=spec,
        decoder=made,
        layouts=layouts,
        states=states_of(local_spec(spec, share)),
        max_model_len=length,
        dtype=asked.name,
        quantization=_format(opened.scheme if target is None else target),
        weight_bytes=sum(size for _, size in reader.report.values()),
        report=reader.report,
        eos_token_ids=generation.eos_token_ids,
        bos_token_id=generation.bos_token_id,
        generation_defaults=generation.sampling,
        folder=opened.folder,
        notes=notes,
        adapters=reader.adapters,
        encoder=parallel_encoder(heard, place, config.parallel),
        decoder_start=generation.decoder_start,
        writing=None if reader.cache is None else reader.cache.keep(),
        place=place,
        span=share.layers,
        pooling=opened.pooling,
        classifier=load_classifier(opened),
        vision=vision,
        known=known,
    )


def _where(config: EngineConfig, ops: Ops, shards: Shards | None) -> Known:
    """What is known of the device, and whether there is nobody to share weights with that are to be shared."""
    device = known_of_device(config, ops.name, ops.chosen)
    alone = config.offload.fully_shard and shards is None
    return device | Known(frozenset({IN_PROCESS})) if alone else device


def check_start(config: EngineConfig, ops: Ops) -> None:
    """`ConfigError` for what the model and the device exclude, from headers alone."""
    found = describe(config.model.model, config.model.load_format, hub_of(config.model))
    check_known(config.features, known_of(config, found) | known_of_device(config, ops.name, ops.chosen))


def _opened(config: EngineConfig) -> ModelHeaders:
    """The model folder; without what reads images, and a line on that, where its text alone is wanted."""
    options = config.model
    opened = open_model(options.model, options.load_format, options.seed, hub_of(options))
    if not options.language_model_only:
        return opened
    told = parts_left_out(read_json(opened.folder / "config.json")) if opened.folder.is_dir() else ()
    return replace(opened, vision=None, notes=tuple(note for note in opened.notes if note not in told))


def _reader(
    config: EngineConfig, opened: ModelHeaders, ops: Ops, form: MatrixForm, share: Share, progress: LoadProgress | None
) -> WeightReader:
    """Reader of what was opened, with room for adapters and with the packed cache, where these are wanted."""
    adapters, cache = load_room(config, opened, ops, share), None
    if not form.runs:
        cache = packed_cache(config, opened, ops, form.dtype, form.target, share)
    if cache is not None:
        cache.load(progress or (lambda done, total, what: None))
    return WeightReader(opened, ops, form, share, progress, adapters, cache)


def _encoder(
    reader: WeightReader, decoder: Decoder, still: AnyArray, others: AudioEncoder | None
) -> Encoder | AudioEncoder | None:
    """The rank's share of the encoder, where there is one; `others`: what stands in for it."""
    if not reader.opened.spec.encoder_decoder:
        return None
    if reader.opened.spec.encoder.rows:
        return load_audio_encoder(reader, still) if others is None else read_by_another(others, reader, still)
    require_torch(f"{reader.opened.spec.family!r}, whose encoder's attention is torch's,", "train")
    return load_encoder(reader, decoder.embed, still)


def _vision(reader: WeightReader, dtype: Dtype) -> Vision | None:
    """What makes rows of images, where the model takes any."""
    opened = reader.opened.vision
    if opened is None:
        return None
    from quire.model.vision.load import load_vision

    vision = load_vision(opened, reader.ops, dtype)
    reader.count("vision", dtype.name, vision.nbytes)
    return vision


def _ropes(reader: WeightReader, length: int) -> dict[Rope, AnyArray]:
    """The tables of layers' ropes for `length` positions, on the device. Second texts have positions behind all of the
    first ones', and turn as these."""
    spec = reader.opened.spec
    turns = any(rope.dim for rope in spec.rope)
    if turns and spec.token_types > 1:
        made = shared_tables(spec.rope, spec.typed_positions // spec.token_types)
        tables = {rope: np.concatenate([table] * spec.token_types) for rope, table in made.items()}
    else:
        tables = shared_tables(spec.rope, length if turns else max(length, spec.typed_positions))
    reader.count("rope", "f32", sum(t.nbytes for t in tables.values()))
    return dict(zip(tables, reader.place(tuple(tables.values())), strict=True))


def _load_borrowed(
    config: EngineConfig, ops: Ops, found: TransformersModel, target: Quantizer | None, device: Known
) -> Model:
    """A model by transformers' code; options that only the table's families have are refused."""
    options = config.model
    name = own_name(options.model, found.folder)
    known = Known(frozenset({BORROWED}), {"model": name, "family": found.spec.family}) | device
    check_known(config.features, known)
    require_torch(f"{found.spec.family!r}, which runs by the code of transformers,", "transformers")
    from quire.model.transformers_backend.load import load_borrowed

    dtype, notes = compute_dtype(options.dtype, found.dtype)
    length = max_model_len(options.max_model_len, found.spec)
    (layout,) = kv_layouts(config.cache, found.spec, dtype, ops)[0]
    decoder, spec, layouts, report = load_borrowed(found, ops, torch_dtype(dtype), target, options.group_size, layout)
    _warn(found.folder, (*found.notes, *notes))
    generation = read_generation(found.folder, spec)
    return Model(
        name=name,
        spec=spec,
        decoder=decoder,
        layouts=layouts,
        max_model_len=length,
        dtype=dtype.name,
        quantization=_format(target),
        weight_bytes=sum(size for _, size in report.values()),
        report=report,
        eos_token_ids=generation.eos_token_ids,
        bos_token_id=generation.bos_token_id,
        generation_defaults=generation.sampling,
        folder=found.folder,
        notes=(*found.notes, *notes),
        pooling=Pooling(refused="this model runs by the code of transformers, which keeps no hidden rows here"),
        known=known,
    )


def _format(of: QuantScheme | Quantizer | None) -> str:
    return "none" if of is None or of is DENSE else of.name


def _warn(folder: Path, notes: tuple[str, ...]) -> None:
    for note in notes:
        log.warning("%s: %s", folder, note)


def form_of(config: EngineConfig, dtype: Dtype, target: Quantizer | None) -> MatrixForm:
    """What matrices become."""
    options = config.model
    return MatrixForm(dtype, target, options.group_size, options.activations, config.parallel.rank_invariant)


def load_adapters(config: EngineConfig, reader: WeightReader, base: Base) -> None:
    """Adapters that are named at the start, for the model `base`, where there is room for any."""
    room = reader.adapters
    if room is not None:
        room.extensions.attach(base)
        for name, folder in parse_modules(config.lora.lora_modules).items():
            room.load(name, folder)
        reader.count("adapters", "f32", room.nbytes)


def load_room(config: EngineConfig, opened: ModelHeaders, ops: Ops, share: Share) -> Adapters | None:
    """Room for LoRA adapters, or None when they were not asked for."""
    lora = config.lora
    if not lora.enable_lora:
        return None
    rows = config.scheduler.rows(max_model_len(config.model.max_model_len, opened.spec))
    return Adapters(opened, share, lora, rows, ops, config.parallel.ranks)


def check_groups(opened: ModelHeaders, target: Quantizer | None, group: int) -> None:
    """Refuse a group size before minutes of loading, naming the first matrix that it does not divide."""
    if target is None:
        return
    for (role, place), parts in opened.claim.parts.items():
        if DISK_ROLES[role].kind == "linear" and not DISK_ROLES[role].wide:
            scheme = target.head if role == "head" else target
            scheme.check(parts["weight"], DISK_ROLES[role].shape(opened.spec.at(place.layer))[1], group)
