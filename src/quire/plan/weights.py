"""Bytes of packed weights, role by role, from headers alone: as the loader accounts for them (`Model.report`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from quire.core.config import EngineConfig
from quire.core.dtypes import BF16, F16
from quire.model.describe import ModelFacts, compute_dtype, max_model_len
from quire.model.families.rope import short_reach
from quire.model.load.roles import ADAPTED, ROLES, Share
from quire.model.role import Role
from quire.model.spec import ModelSpec
from quire.ops.choice import Choice
from quire.ops.facts import BF12_CHUNK, BF12_EXCEPTION_BYTES, LANES
from quire.quant.base import Quantizer
from quire.quant.codebook import MXFP4, NF4
from quire.quant.registry import quantizer

CODE_BITS = {"int8": 8, "fp8": 8}
"""Of a number in formats made at load; the others have 4."""


def weight_bytes(parameters: int, bits: float) -> int:
    """Parameters x bits / 8; with group scales of 16 bits, `bits` is bits + 16 / group."""
    return round(parameters * bits / 8)


@dataclass(frozen=True)
class WeightPart:
    """The matrices, tables or vectors of one role that a rank keeps: `copies` of [n, k] in the format `kind`.

    `layers`: how many of the rank's layers have it; 0: it is of no layer. `read`: share of the copies that a row reads,
    less than 1 of experts, more of layers that run several times. `product`: a row is multiplied with it; tables are
    looked up.
    """

    role: str
    kind: str
    shape: tuple[int, int]
    copies: int
    layers: int
    nbytes: int
    product: bool
    read: float = 1.0

    @property
    def numbers(self) -> int:
        """Numbers in all copies."""
        return prod(self.shape) * self.copies


class WeightFormats:
    """What the numbers of each role become at load: (kind, bits of one with its part of the scales)."""

    def __init__(self, config: EngineConfig, found: ModelFacts, choice: Choice) -> None:
        self._config, self._found = config, found
        self.dtype, _ = compute_dtype(config.model.dtype, found.dtype)
        self.reads_files = choice.backend != "triton"
        self.on_cpu, self._gpu = choice.backend == "cpu", choice.backend == "triton"
        self.target = quantizer(config.model.quantization, found.stored)
        self._code4 = 8 if choice.backend == "reference" else 4  # torch's definitions spend a byte on a code

    def of(self, name: str, role: Role) -> tuple[str, float]:
        """Format of the role `name`."""
        found = self._found
        if role.kind in ("vector", "dense"):
            exact = role.kind == "dense" and self.on_cpu and found.dtype == BF16
            return ("bf16", 16.0) if exact else ("f32", 32.0)
        if role.kind == "linear" and self.target is not None and not role.wide:
            return self._made(self.target.head if name == "head" else self.target)
        kept = found.matrix_bits if role.kind == "linear" and role.layer else found.outer_bits.get(name, 0.0)
        if kept:
            return self._stored(kept)
        narrow = self.packs(name, role) and self.on_cpu and self.dtype == BF16 and self._config.device.bf16_bits == 12
        if name in ("kv_b", "k_b", "v_b") and self.dtype == F16 and not self._gpu:
            return "f32", 32.0  # products of latents are of f32 and bf16
        short = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}[self.dtype.name]
        return ("bf12", 12.0) if narrow else (short, 8.0 * self.dtype.itemsize)

    def packs(self, name: str, role: Role) -> bool:
        """Whether the role is packed as matrices are: of tables that of tokens, where a head without bits of its own
        is the same, and those that files have quantized (`load_table`)."""
        shared = name == "embed" and self._found.spec.tied_head and self.target is None
        table = shared or self._found.outer_bits.get(name, 0.0) > 0
        return role.kind in ("linear", "dense") or table

    def in_file(self, name: str) -> bool:
        """Whether rows of the table `name` are read out of the file, and no others are in memory."""
        return self.reads_files and name in self._found.in_file

    def _made(self, target: Quantizer) -> tuple[str, float]:
        """Scales are of 16 bits, but of a code book whose scales are no powers of two: floats."""
        book = target in (NF4, MXFP4)
        group, name = self._config.model.group_size, "table4" if book else target.name
        bits = CODE_BITS.get(target.name, self._code4)
        return f"{name} g{group}", bits + (32 if target is NF4 else 16) / group

    def _stored(self, bits: float) -> tuple[str, float]:
        """A file that is quantized already: by the bits that a number takes when loaded."""
        kind = "int8 g32" if bits > 7 else "int4 g32" if bits >= 4 else "super2"
        return kind, bits + (self._code4 - 4 if bits < 8 else 0)


def weight_parts(
    config: EngineConfig, found: ModelFacts, choice: Choice, share: Share | None = None
) -> list[WeightPart]:
    """All that a rank with `share` of the model keeps, rope tables and the room for adapters included.

    `ConfigError` where the model cannot be split so. Where no roles are known, every number is one of a matrix.
    """
    formats, share = WeightFormats(config, found, choice), share or Share()
    if not found.roles:
        kind, bits = formats.of("q", ROLES["q"])
        whole = (found.parameters // found.spec.hidden, found.spec.hidden)
        return [WeightPart("weights", kind, whole, 1, found.spec.layers, weight_bytes(found.parameters, bits), True)]
    parts = [part for name in found.roles for part in _parts(name, formats, found, share)]
    extras = [_ropes(config, found.spec), _biases(found, share), *_adapters(config, found, share)]
    extras += _vision(formats, found, share)
    return [*parts, *(part for part in extras if part.nbytes)]


def _parts(name: str, formats: WeightFormats, found: ModelFacts, share: Share) -> Iterator[WeightPart]:
    """What a rank keeps of a role: a part for all layers of one size."""
    role, spec = ROLES[name], found.spec
    layers = Counter(spec.at(i) for i in _layers(role, spec, share))
    for sized, count in layers.items() if role.layer else ((spec, 0),):
        if (part := _part(name, formats, sized, count, share)) is not None:
            yield part


def _part(name: str, formats: WeightFormats, spec: ModelSpec, layers: int, share: Share) -> WeightPart | None:
    role = ROLES[name]
    if name == "head" and spec.tied_head and formats.target is None:
        return None  # the table of tokens is the head's matrix
    copies = layers * (len(share.held(0, spec)) if role.experts else 1)
    if not role.layer:
        copies = 1 if _has_outer(name, spec, share) else 0
    if not copies:
        return None
    *rows, columns = share.shape(name, spec) if len(share.shape(name, spec)) > 1 else (1, *share.shape(name, spec))
    kind, bits = formats.of(name, role)
    lanes = LANES if formats.on_cpu and formats.packs(name, role) else 1
    padded = -(-prod(rows) // lanes) * lanes
    read = spec.moe.routing.top_k / spec.moe.routing.experts if role.experts else 1.0
    if role.layer and not role.encoder:
        read *= spec.layers / len(spec.weighted_layers)
    tied = name == "embed" and spec.tied_head and formats.target is None
    size = 0 if formats.in_file(name) else weight_bytes(padded * columns * copies, bits)
    if kind == "bf12":  # exceptions of 256 columns each, or of as many as there are
        size = copies * (
            padded * columns * 12 // 8 + padded // LANES * -(-columns // BF12_CHUNK) * BF12_EXCEPTION_BYTES
        )
    return WeightPart(
        name, kind, (prod(rows), columns), copies, layers, size, role.kind in ("linear", "dense") or tied, read,
    )  # fmt: skip


def _layers(role: Role, spec: ModelSpec, share: Share) -> list[int]:
    """Layers of this rank that have the role."""
    if not role.layer:
        return []
    span = share.span(spec)
    return [i for i in role.layers(spec) if (role.encoder or i in span) and role.where(spec, i)]


def _has_outer(name: str, spec: ModelSpec, share: Share) -> bool:
    """Whether a stage has a part that is of no layer: the first what comes before them, the last what follows."""
    span = share.span(spec)
    if name.startswith("input_") or (name == "embed" and spec.inputs.width):
        return True
    if name in ("final_norm", "project_out", "head_dense", "head_norm", "head", "head_bias"):
        return span.stop == spec.layers or (name in ("head", "head_bias") and share.head is not None)
    return span.start == 0 or (name == "embed" and spec.tied_head and span.stop == spec.layers)


def _ropes(config: EngineConfig, spec: ModelSpec) -> WeightPart:
    """A table [positions, 2, dim / 2] f32 of each rope that layers share, and that of short sequences."""
    length = max_model_len(config.model.max_model_len, spec)
    numbers = sum(rope.dim for rope in set(spec.rope)) * (length + short_reach(spec.rope, length))
    return WeightPart("rope", "f32", (1, numbers), 1, 0, 4 * numbers, False)


def _biases(found: ModelFacts, share: Share) -> WeightPart:
    numbers = found.bias_numbers // share.world
    return WeightPart("biases", "f32", (1, numbers), 1, 0, 4 * numbers, False)


def _adapters(config: EngineConfig, found: ModelFacts, share: Share) -> list[WeightPart]:
    """Room for low-rank pairs of every matrix of a layer that adapters may change, f32."""
    if not config.lora.enable_lora:
        return []
    slots, rank = max(config.lora.max_loras, len(config.lora.lora_modules)), config.lora.max_lora_rank
    spec, numbers = found.spec, 0
    for name in ADAPTED & set(found.roles):
        layers = _layers(ROLES[name], spec, share)
        numbers += sum(sum(share.shape(name, spec.at(i))) for i in layers) * slots * rank
    return [WeightPart("adapters", "f32", (1, numbers), 1, 0, 4 * numbers, False)]


def _vision(formats: WeightFormats, found: ModelFacts, share: Share) -> list[WeightPart]:
    """What makes rows of images, whole, on rank 0 alone; no token is multiplied with it."""
    seen = found.vision
    if seen is None or share.rank or share.span(found.spec).start:
        return []
    lanes = LANES if formats.on_cpu else 1
    wide = sum(-(-n // lanes) * lanes * k for n, k in seen.matrices) + seen.tables
    size = wide * formats.dtype.itemsize + 4 * seen.others
    return [WeightPart("vision", formats.dtype.name, (1, wide + seen.others), 1, 0, size, False)]
