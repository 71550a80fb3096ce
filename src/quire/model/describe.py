"""What a model is, from its headers alone: config and tensors are read, checked and claimed, and no weight is read.

Nothing here imports torch, so that `quire inspect` answers at once; `build` goes on from here to a decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.core.dtypes import BF16, F16, F32, F64, Dtype
from quire.core.errors import ConfigError, ModelError
from quire.core.pooling import NO_VECTORS, Pooling
from quire.model.disk.assistant_headers import open_assistant
from quire.model.disk.checkpoint import Checkpoint, TensorSource, float_dtype, resolve
from quire.model.disk.claim import claim, drop_layers_beyond
from quire.model.disk.dummy import DummyWeights
from quire.model.disk.generation import GenerationDefaults, read_generation
from quire.model.disk.gguf_model import GgufModel
from quire.model.disk.gguf_pooling import file_pooling
from quire.model.disk.headers import ModelHeaders, VisionHeaders
from quire.model.disk.hf_config import HfConfig, read_json
from quire.model.disk.mlm_head import with_every_part, with_mlm_head
from quire.model.disk.mmproj_file import find_mmproj, refuse_mmproj
from quire.model.disk.mtp_layer import left_out, part_mtp, with_mtp
from quire.model.disk.pooling_config import CLASSIFIER, classifies, headless, read_pooling
from quire.model.disk.renamed_tensors import Rewritten
from quire.model.disk.source_subset import FirstRows, SourceSubset
from quire.model.disk.stacked import StackedSource
from quire.model.families.find import read_spec
from quire.model.families.row import Family
from quire.model.families.text_parts import as_found, find_text, parts_left_out, text_part
from quire.model.load.roles import DISK_ROLES
from quire.model.mixers.layer_mixers import kv_bytes_per_token
from quire.model.mixers.mixer import WIDE
from quire.model.spec import ModelSpec
from quire.model.stream_roles import IN_FILE
from quire.model.transformers_backend.detect import TransformersModel, borrowed_headers
from quire.model.vision.mmproj import open_mmproj
from quire.model.vision.vision_headers import open_vision, part
from quire.quant.registry import cache_scales, detect, matrix_scheme
from quire.store.catalog import look_up
from quire.store.hub import NEWEST, Hub

OUTER = ("embed", "head", *IN_FILE)


@dataclass(frozen=True)
class VisionFacts:
    """What makes rows of images: `tower` and `projector`, and how many numbers they have in matrices and elsewhere.

    `kind`: the `model_type` of the whole, whose decoder is of a family of its own. `matrices`: [n, k] of each;
    `tables`: numbers that are looked up; `others`: of norms, biases and vectors.
    """

    kind: str
    tower: ModelSpec
    projector: ModelSpec
    tensors: int
    matrices: tuple[tuple[int, int], ...]
    tables: int
    others: int

    @property
    def parameters(self) -> int:
        """All numbers."""
        return sum(n * k for n, k in self.matrices) + self.tables + self.others


@dataclass(frozen=True)
class ModelFacts:
    """What `describe` finds without reading a weight. Sizes in bytes, `dtype` as on disk, KV counted in bf16.

    `active_parameters`: less those of the experts a token does not take. `roles`: those the model has for certain.
    `stored`, `quantized`: as of `ModelHeaders`. `borrowed`: it runs by the code of transformers.
    `matrix_bits`: bits that a number of a quantized matrix takes when loaded, 0 where it is kept unquantized;
    `outer_bits`: the same of tables and of a head of its own, by role; `in_file`: bytes on disk of tables whose rows
    are read one at a time. `bias_numbers`: in all biases.
    `vision`, and `mtp`, the layer that drafts: beside all of that, which is of the decoder; only `bytes_on_disk` and
    `tensors` are of all.
    """

    name: str
    folder: Path
    spec: ModelSpec
    roles: tuple[str, ...]
    scheme: str
    stored: str
    matrix_bits: float
    outer_bits: Mapping[str, float]
    dtype: Dtype
    tensors: int
    parameters: int
    active_parameters: int
    bytes_on_disk: int
    kv_bytes_per_token: int
    generation: GenerationDefaults
    notes: tuple[str, ...]
    bias_numbers: int = 0
    in_file: Mapping[str, int] = field(default_factory=dict)
    vision: VisionFacts | None = None
    quantized: bool = False
    borrowed: bool = False
    pooling: Pooling = NO_VECTORS
    mtp: ModelFacts | None = None


def open_model(model: str, load_format: str = "auto", seed: int = 0, hub: Hub = NEWEST) -> ModelHeaders:
    """Read config and headers of `model` (folder, GGUF file, hub name, "" = the embedded one), claim every tensor."""
    folder = resolve(model, hub)
    gguf = GgufModel.open(folder) if folder.is_file() else None
    raw = dict[str, Any]() if gguf is not None else read_json(folder / "config.json")
    if gguf is not None:
        spec, family, config = gguf.read_spec()
    else:
        spec, family, config = read_spec(raw, str(folder / "config.json"))
    source: TensorSource
    origins, notes, vision_part = dict[str, str](), list[str](), None
    if load_format == "dummy":
        family, spec = with_every_part(folder, config, spec, family)
        source = DummyWeights(spec, family, family.required_parts(config), seed)
    elif gguf is None:
        checkpoint = Checkpoint(folder)
        notes += [*checkpoint.notes, *parts_left_out(raw)]
        text, vision_part = part(checkpoint, raw)
        text, family = decoder_alone(text, family, raw)
        source = rewritten = Rewritten(text, family.rewrites)
        origins = rewritten.origins
    else:
        source, notes = gguf.source(), [*gguf.notes]
    family = family.named_as(source.infos)
    family, spec, source = with_mlm_head(folder, config, spec, family, source)
    source = first_rows(source, spec, family)
    source, further = part_mtp(source, spec, family)
    notes += left_out(source, spec, family)
    if gguf is None:  # whose readers count tensors
        notes += drop_layers_beyond(source.infos, spec, family)
    nested = vision_part is not None or text_part(raw) is not None
    if nested and f"{family.names.get('head')}.weight" in source.infos:
        spec = replace(spec, tied_head=False)  # what files of these models say of it, writers read in several ways
    bare = not spec.tied_head and headless(config, family.names.get("head", ""), source.infos)
    if bare:
        spec = replace(spec, tied_head=True)  # there is a matrix to stand in its place, which no request uses
    if classifies(config):
        family = replace(family, skipped=(*family.skipped, CLASSIFIER))
    if gguf is not None and load_format != "dummy":
        scheme, dtype = gguf.tensors.scheme, gguf.tensors.dtype
    else:
        if family.stacks:
            source = StackedSource(source, family, spec.layers)
        endings, spoken = cache_scales(config.child("quantization_config"))
        family = replace(family, buffers=(*family.buffers, *endings))
        scheme, dtype = detect(source.infos, config.child("quantization_config"), origins), float_dtype(source.infos)
        notes += spoken
    notes += scheme.notes
    if config.has("auto_map"):
        notes.append("auto_map in config.json is ignored: code from a model folder is never run")
    try:
        claimed = claim(source.infos, spec, family, family.required_parts(config), scheme)
    except ModelError as error:
        raise ModelError(f"{folder}: {error.message}") from None
    pooling = _pooling(folder, config, spec, bare, gguf, family.mlm is not None)
    seen = _images(model, gguf, hub, spec, notes)
    vision, spec = seen or (open_vision(folder, raw, spec, vision_part, seed), spec)
    named, told = own_name(model, folder), tuple(notes)
    made = ModelHeaders(named, folder, config, spec, family, source, scheme, claimed, dtype, told, pooling, vision)
    return with_mtp(made, further)


def _pooling(
    folder: Path, config: HfConfig, spec: ModelSpec, bare: bool, gguf: GgufModel | None, masked: bool
) -> Pooling:
    """How the model makes vectors or classes, as its folder or its file says. `bare`: it has no head; `masked`: it has
    one that fills in masked tokens."""
    generates, vocabulary = not bare and not spec.bidirectional, spec.vocab_size if masked else 0
    made = read_pooling(folder, config, spec.hidden, generates, spec.bidirectional, vocabulary)
    return made if gguf is None else file_pooling(gguf.file, gguf.prefix, gguf.architecture, made)


def _images(
    model: str, gguf: GgufModel | None, hub: Hub, spec: ModelSpec, notes: list[str]
) -> tuple[VisionHeaders, ModelSpec] | None:
    """What makes rows of images for a GGUF model, if there is a file for it, and the decoder's shape with images."""
    if gguf is None:
        refuse_mmproj(hub, model)
        return None
    found = find_mmproj(model, gguf.file.path, hub, notes)
    if found is None:
        return None
    vision, sight = open_mmproj(found, gguf, spec)
    return vision, replace(spec, sight=sight)


def decoder_alone(source: TensorSource, family: Family, raw: Mapping[str, Any]) -> tuple[TensorSource, Family]:
    """The tensors of a decoder among those of a model of which nothing else runs, and its names as the files have them;
    both as they are where all runs. `raw`: config.json."""
    part = text_part(raw)
    if part is None:
        return source, family
    found = find_text(source.infos, family, part.hint)
    if found is None:
        return source, family  # claims say what is missing
    return SourceSubset(source, found.kept), as_found(family, found)


def first_rows(source: TensorSource, spec: ModelSpec, family: Family) -> TensorSource:
    """`source` without rows that no role uses, behind those that one does."""
    used = {f"{family.names[role]}.weight": DISK_ROLES[role].shape(spec)[0] for role in family.longer}
    return FirstRows(source, used) if used else source


def describe(model: str, load_format: str = "auto", hub: Hub = NEWEST) -> ModelFacts:
    """Facts of `model` from config and headers alone; no weight is read."""
    borrowed = borrowed_headers(resolve(model, hub))
    if borrowed is not None:
        return _describe_borrowed(model, borrowed)
    return _facts(open_model(model, load_format, hub=hub))


def describe_assistant(model: str, hub: Hub) -> ModelFacts:
    """Facts of a model that drafts for another; errors as of `open_assistant`."""
    return _facts(open_assistant(model, hub))


def _facts(opened: ModelHeaders) -> ModelFacts:
    infos, routing = opened.source.infos, opened.spec.moe.routing
    total = opened.claim.parameters(infos, opened.scheme)
    routed = opened.claim.parameters(infos, opened.scheme, experts_only=True)
    seen = opened.vision
    parts = (opened,) if seen is None or seen.nbytes else (opened, seen.tower, seen.projector)
    vision = None if seen is None else _vision_facts(seen)
    mtp = None if opened.mtp is None else _facts(opened.mtp)
    return ModelFacts(
        name=opened.name,
        folder=opened.folder,
        spec=opened.spec,
        roles=opened.family.roles(opened.config),
        scheme=opened.scheme.name,
        stored=opened.stored,
        matrix_bits=opened.claim.bits_per_number(infos, opened.scheme),
        outer_bits={role: matrix_scheme(opened.scheme, opened.claim.get(role)).bits_per_number for role in OUTER},
        in_file={role: size for role in IN_FILE if (size := opened.in_file(role))},
        dtype=opened.dtype,
        tensors=sum(part.tensors for part in (vision, mtp) if part is not None) + len(infos),
        parameters=total,
        active_parameters=total - (routed // routing.experts * (routing.experts - routing.top_k) if routed else 0),
        bytes_on_disk=sum(i.nbytes for part in parts for i in part.source.infos.values())
        + (0 if mtp is None else mtp.bytes_on_disk)
        + (0 if seen is None else seen.nbytes),
        kv_bytes_per_token=kv_bytes_per_token(opened.spec, BF16),
        generation=read_generation(opened.folder, opened.spec),
        notes=opened.notes,
        bias_numbers=sum(infos[p["bias"]].numbers for p in opened.claim.parts.values() if "bias" in p),
        vision=vision,
        quantized=opened.quantized,
        mtp=mtp,
        pooling=opened.pooling,
    )


def _vision_facts(opened: VisionHeaders) -> VisionFacts:
    matrices, tables, others = list[tuple[int, int]](), 0, 0
    for made in (opened.tower, opened.projector):
        for (role, _), parts in made.claim.parts.items():
            info, form = made.source.infos[parts["weight"]], DISK_ROLES[role].kind
            matrices += [(info.shape[0], info.shape[1])] if form == "linear" else []
            tables += info.numbers if form == "table" else 0
            others += info.numbers if form == "vector" else 0
            others += made.source.infos[parts["bias"]].numbers if "bias" in parts else 0
    tensors = sum(len(made.source.infos) for made in (opened.tower, opened.projector))
    kind, tower, projector = opened.projector.config.text("model_type"), opened.tower.spec, opened.projector.spec
    return VisionFacts(kind, tower, projector, tensors, tuple(matrices), tables, others)


def _describe_borrowed(model: str, found: TransformersModel) -> ModelFacts:
    infos = found.checkpoint.infos
    parameters = sum(i.numbers for i in infos.values())
    return ModelFacts(
        name=own_name(model, found.folder),
        folder=found.folder,
        spec=found.spec,
        roles=(),
        scheme="unquantized",
        stored="",
        matrix_bits=0,
        outer_bits={},
        dtype=found.dtype,
        tensors=len(infos),
        parameters=parameters,
        active_parameters=parameters,
        bytes_on_disk=found.checkpoint.nbytes,
        kv_bytes_per_token=kv_bytes_per_token(found.spec, BF16),
        generation=read_generation(found.folder, found.spec),
        notes=found.notes,
        borrowed=True,
    )


def own_name(model: str, folder: Path) -> str:
    """A name of the hub or of the store as it was given, otherwise that of the folder or file."""
    if not Path(model).expanduser().exists() and ("/" in model or look_up(model) is not None):
        return model
    named = folder if folder.name not in ("", "..") else folder.resolve()  # "." and ".." say no name
    return named.stem if named.is_file() else named.name


def compute_dtype(asked: str, on_disk: Dtype) -> tuple[Dtype, tuple[str, ...]]:
    """Dtype of unquantized weights, and a note when numbers change.

    "auto": that of the file, f32 if it is wider, bf16 if it has codes.
    """
    dtype = WIDE.get(asked) or {F32: F32, F64: F32, F16: F16}.get(on_disk, BF16)
    if dtype == BF16 and on_disk == F16:
        return dtype, (
            "float16 weights are kept as bfloat16: 8 instead of 11 significant bits; --dtype float32 keeps all",
        )
    return dtype, ()


def max_model_len(asked: int, spec: ModelSpec, usual: int = 0) -> int:
    """`--max-model-len`, 0 = what config.json gives, or `usual`, if that is less; `ConfigError` when the positions
    cannot be computed faithfully."""
    if asked > spec.max_length:
        raise ConfigError(
            f"--max-model-len {asked} is more than this model's {spec.max_length} positions; use at most that",
            param="max_model_len",
        )
    if 0 < asked <= spec.encoder.room:
        raise ConfigError(
            f"--max-model-len {asked}: what the encoder hears takes {spec.encoder.room} of it; use at least "
            f"{spec.encoder.room + 1}",
            param="max_model_len",
        )
    return asked or min(spec.max_position, usual or spec.max_position) + spec.encoder.room
