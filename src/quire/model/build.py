"""From a model folder to a decoder: claim -> canonical roles -> shard -> fuse -> quantize -> pack, one layer at a time.

Peak memory is the packed model and one layer: weights are views of the mapped file until they are packed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, ModelError
from quire.model.checkpoint import Checkpoint, Source, float_dtype, resolve
from quire.model.claim import Claim, claim
from quire.model.decoder import Decoder, Layer
from quire.model.dummy import DummyWeights
from quire.model.families import Family, read_spec
from quire.model.generation import GenerationDefaults, read_generation
from quire.model.hf_config import HfConfig, read_json
from quire.model.linear import Linear
from quire.model.memory import kv_bytes_per_token
from quire.model.roles import ROLES, shard
from quire.model.rope import shared_tables
from quire.model.spec import ModelSpec
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops
from quire.ops.layout import KVLayout
from quire.quant.base import Quantizer, QuantScheme, QWeight
from quire.quant.registry import detect, matrix_scheme, quantizer

log = logging.getLogger(__name__)
Progress = Callable[[int, int, str], None]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Opened:
    """A model folder read as far as its headers, and checked: all that `describe` and `load_model` share."""

    name: str
    folder: Path
    config: HfConfig
    spec: ModelSpec
    family: Family
    source: Source
    scheme: QuantScheme
    claim: Claim
    dtype: torch.dtype
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ModelFacts:
    """What `describe` finds without reading a weight. Sizes in bytes, `dtype` as on disk, KV counted in bf16."""

    name: str
    folder: Path
    spec: ModelSpec
    scheme: str
    dtype: str
    tensors: int
    parameters: int
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
    decoder: Decoder
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


def open_model(model: str, load_format: str = "auto", seed: int = 0) -> Opened:
    """Read config and headers of `model` (folder, hub name, "" = the embedded model) and claim every tensor."""
    folder = resolve(model)
    spec, family, config = read_spec(read_json(folder / "config.json"), str(folder / "config.json"))
    required = family.required_parts(config)
    source: Source = DummyWeights(spec, family, required, seed) if load_format == "dummy" else Checkpoint(folder)
    scheme = detect(source.infos, config.child("quantization_config"))
    notes = list(scheme.notes)
    if config.has("auto_map"):
        notes.append("auto_map in config.json is ignored: code from a model folder is never run")
    try:
        claimed = claim(source.infos, spec, family, required, scheme)
    except ModelError as error:
        raise ModelError(f"{folder}: {error.message}") from None
    dtype = float_dtype(source.infos)
    name = model if "/" in model and not Path(model).exists() else folder.name
    return Opened(name, folder, config, spec, family, source, scheme, claimed, dtype, tuple(notes))


def describe(model: str, load_format: str = "auto") -> ModelFacts:
    """Facts of `model` from config and headers alone; no weight is read."""
    opened = open_model(model, load_format)
    infos = opened.source.infos
    return ModelFacts(
        name=opened.name,
        folder=opened.folder,
        spec=opened.spec,
        scheme=opened.scheme.name,
        dtype=dtype_name(opened.dtype),
        tensors=len(infos),
        parameters=sum(int(torch.Size(i.shape).numel()) for i in infos.values()),
        bytes_on_disk=sum(i.nbytes for i in infos.values()),
        kv_bytes_per_token=kv_bytes_per_token(opened.spec, 2),
        generation=read_generation(opened.folder, opened.spec),
        notes=opened.notes,
    )


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
    opened = open_model(options.model, options.load_format, options.seed)
    spec = opened.spec
    dtype, notes = compute_dtype(options.dtype, opened.dtype)
    length = max_model_len(options.max_model_len, spec)
    if target is not None:
        check_groups(opened, target, options.group_size)
    kv_dtype = DTYPES.get(config.cache.kv_cache_dtype, dtype)
    layout = KVLayout(config.cache.block_size, spec.kv_heads, spec.head_dim, kv_dtype)
    loader = Loader(opened, ops, dtype, target, options.group_size, progress)
    ropes = shared_tables(spec.rope, length)
    embed = loader.table("embed")
    layers = tuple(loader.layer(i, ropes[spec.rope[i]]) for i in range(spec.layers))
    decoder = Decoder(ops, embed, layers, loader.needed_vector("final_norm"), loader.head(), spec.norm_eps)
    loader.count("rope", "f32", sum(t.nbytes for t in ropes.values()))
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
    )


def check_groups(opened: Opened, target: Quantizer, group: int) -> None:
    """Refuse a group size before minutes of loading, naming the first matrix that it does not divide."""
    if set(opened.scheme.parts) != {"weight"}:
        raise ConfigError(
            f"--quantization {target.name}: {opened.folder} is quantized already ({opened.scheme.name}); leave it out",
            param="quantization",
        )
    for (role, _), parts in opened.claim.parts.items():
        if ROLES[role].kind == "linear":
            scheme = target.head if role == "head" else target
            scheme.check(parts["weight"], opened.source.infos[parts["weight"]].shape[1], group)


class Loader:
    """Reads claimed tensors, and packs them; keeps the account of what became of each role."""

    def __init__(
        self,
        opened: Opened,
        ops: Ops,
        dtype: torch.dtype,
        target: Quantizer | None,
        group: int,
        progress: Progress | None,
    ) -> None:
        self.opened = opened
        self.ops = ops
        self.dtype = dtype
        self.target = target
        self.group = group
        self.report: dict[str, tuple[str, int]] = {}
        self._progress = progress or (lambda done, total, what: None)
        self._done = 0
        self._total = sum(i.nbytes for i in opened.source.infos.values())

    def count(self, role: str, kind: str, nbytes: int) -> None:
        """Add `nbytes` of `kind` to the account of `role`."""
        self.report[role] = (kind, nbytes + self.report.get(role, ("", 0))[1])

    def layer(self, index: int, rope: Tensor) -> Layer:
        """Layer `index`, packed."""
        spec = self.opened.spec
        q_norm, k_norm = self.vector("q_norm", index), self.vector("k_norm", index)
        layer = Layer(
            attn_norm=self.needed_vector("attn_norm", index),
            qkv=self.linear(("q", "k", "v"), index),
            qk_norms=None if q_norm is None or k_norm is None else (q_norm, k_norm),
            rope=rope,
            o=self.linear(("o",), index),
            mlp_norm=self.needed_vector("mlp_norm", index),
            gate_up=self.linear(("gate", "up"), index),
            down=self.linear(("down",), index),
            attend=AttentionSpec(spec.attention_scale, spec.windows[index]),
            eps=spec.norm_eps,
            activation=spec.activation,
        )
        self._progress(self._done, self._total, f"layer {index}")
        return layer

    def head(self) -> Linear:
        """The output head; a tied one is packed from the embedding table, which stays as it is for look-ups."""
        linear = self.linear(("head",) if self.opened.claim.get("head") else ("embed",), None)
        self._progress(self._total, self._total, "head")
        return linear

    def vector(self, role: str, layer: int | None = None) -> Tensor | None:
        """A norm's weight as f32, or None when the checkpoint has none."""
        name = self.opened.claim.get(role, layer).get("weight")
        if name is None:
            return None
        tensor = self._read(name).float().clone()
        self.count("norms", "f32", tensor.nbytes)
        return tensor

    def needed_vector(self, role: str, layer: int | None = None) -> Tensor:
        """A norm's weight that the claim has made sure of."""
        tensor = self.vector(role, layer)
        assert tensor is not None
        return tensor

    def table(self, role: str) -> Tensor:
        """A look-up table in the compute dtype, copied out of the mapped file."""
        tensor = self._read(self.opened.claim.get(role)["weight"]).to(self.dtype, copy=True)
        self.count(role, dtype_name(tensor.dtype), tensor.nbytes)
        return tensor

    def linear(self, roles: tuple[str, ...], layer: int | None) -> Linear:
        """The matrices of `roles` quantized, fused by rows and packed, with their biases (zeros where one has none)."""
        parts = [self._part(role, layer) for role in roles]
        packed = QWeight.cat_rows([w for w, _ in parts]).pack(self.ops)
        bias = None
        if any(b is not None for _, b in parts):
            bias = torch.cat([torch.zeros(w.shape[0]) if b is None else b for w, b in parts])
            self.count("biases", "f32", bias.nbytes)
        name = "head" if layer is None else "+".join(roles)
        self.count(name, parts[0][0].label, packed.nbytes)
        return Linear(packed, bias)

    def _part(self, role: str, layer: int | None) -> tuple[QWeight, Tensor | None]:
        """One role's matrix in its final format, and its bias as f32."""
        names = self.opened.claim.get(role, layer)
        scheme = matrix_scheme(self.opened.scheme, names)
        try:
            if self.target is None:
                weight = scheme.load({s: self._read(name) for s, name in names.items() if s != "bias"}, self.dtype)
            else:
                target = self.target.head if layer is None else self.target
                weight = target.quantize(self._read(names["weight"]), self.group)
        except ModelError as error:
            raise ModelError(f"{self.opened.folder}: {next(iter(names.values()))}: {error.message}") from None
        bias = self._read(names["bias"]).float().clone() if "bias" in names else None
        return shard(weight, bias, role, self.opened.spec, rank=0, world=1)

    def _read(self, name: str) -> Tensor:
        self._done += self.opened.source.infos[name].nbytes
        return self.opened.source.tensor(name)
