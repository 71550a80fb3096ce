"""Every tensor of a checkpoint is taken by a role. One left over, missing or misshapen is an error that names it.

An unknown feature of a model thereby fails loudly at load instead of giving slightly wrong text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from quire.core.dtypes import is_float
from quire.core.errors import ModelError
from quire.model.disk.checkpoint import TensorInfo
from quire.model.families.row import Family
from quire.model.load.roles import DISK_ROLES, FUSED
from quire.model.mixers.attention import KEY_VALUE
from quire.model.role import Role
from quire.model.spec import ModelSpec
from quire.quant.base import QuantScheme
from quire.quant.registry import DENSE, matrix_scheme

IGNORED = (".rotary_emb.inv_freq",)  # a buffer that old files carry; the table is computed from config.json
SHOWN = 6


class RolePlace(NamedTuple):
    """Where in a model a role is: its layer and expert, None for what is not of one."""

    layer: int | None = None
    expert: int | None = None


@dataclass(frozen=True)
class Claim:
    """Which tensor on disk is which part of which role: (role, place) -> {part: tensor name}."""

    parts: Mapping[tuple[str, RolePlace], Mapping[str, str]]

    def get(self, role: str, layer: int | None = None, expert: int | None = None) -> Mapping[str, str]:
        """The parts of a role, empty when the checkpoint does not have it."""
        return self.parts.get((role, RolePlace(layer, expert)), {})

    def holder(self, role: str, layer: int | None = None, expert: int | None = None) -> str:
        """The role itself, or the fused matrix that holds it on disk."""
        place = RolePlace(layer, expert)
        fused = (name for name, roles in FUSED.items() if role in roles and (name, place) in self.parts)
        return role if (role, place) in self.parts else next(fused, role)

    def parameters(self, infos: Mapping[str, TensorInfo], scheme: QuantScheme, experts_only: bool = False) -> int:
        """Numbers of the model, or of its routed experts: a matrix counts n * k, however it is kept on disk."""
        total = 0
        for (_, place), parts in self.parts.items():
            if experts_only and place.expert is None:
                continue
            shapes = {s: infos[name].shape for s, name in parts.items()}
            total += math.prod(matrix_scheme(scheme, parts).shape(shapes)) + math.prod(shapes.get("bias", (0,)))
        return total

    def bits_per_number(self, infos: Mapping[str, TensorInfo], scheme: QuantScheme) -> float:
        """Mean bits of a number of the layers' quantized matrices when loaded; 0 when there are none."""
        bits, numbers = 0.0, 0
        for (_, place), parts in self.parts.items():
            own = matrix_scheme(scheme, parts)
            if place.layer is not None and own.bits_per_number:
                count = math.prod(own.shape({s: infos[name].shape for s, name in parts.items()}))
                bits, numbers = bits + count * own.bits_per_number, numbers + count
        return bits / numbers if numbers else 0.0


def scheme_of(role: Role, scheme: QuantScheme, base: str, names: Collection[str]) -> QuantScheme:
    """The format of one role's tensors `base`.*: a quantized checkpoint holds dense matrices too."""
    present = {s: f"{base}.{s}" for s in scheme.parts if role.kind != "vector" and f"{base}.{s}" in names}
    return matrix_scheme(scheme, present)


def slots(spec: ModelSpec, family: Family) -> Iterator[tuple[str, Role, RolePlace, str]]:
    """(role name, role, place, base name on disk) of everything a checkpoint of this spec may hold."""
    for name, role in DISK_ROLES.items():
        if name not in family.names:
            continue
        base = family.names[name]
        for layer in role.layers(spec) if role.layer else (None,):
            if layer is not None and not role.where(spec, layer):
                continue
            if role.encoder and layer is not None:
                called = family.names["encoder_layer"].format(layer) + base
            else:
                called = base if layer is None else family.module(name, spec, layer)
            for expert in range(spec.moe.routing.experts) if role.experts else (None,):
                yield name, role, RolePlace(layer, expert), called if expert is None else called.format(expert)


def unread(spec: ModelSpec, family: Family) -> tuple[str, ...]:
    """Beginnings of the names of tensors that may be there and are not read.

    They belong to parts that are not run, or are keys and values of layers that read another's.
    """
    return family.skipped + tuple(
        f"{family.module(name, spec, layer)}."
        for layer in range(spec.layers)
        for name in KEY_VALUE
        if name in family.names and spec.kv_layer(layer) != layer
    )


def disk_shape(role: Role, spec: ModelSpec, family: Family) -> tuple[int, ...]:
    """The shape of a role's unquantized weight on disk: a few families keep matrices as [k, n].

    Their quantized files do not: those who quantize turn each matrix into the [n, k] of a linear layer first. Taps of
    convolutions are [n, 1, taps], as each channel reads one.
    """
    shape = role.shape(spec)
    if role.biased and len(shape) > 1:
        return shape[0], 1, *shape[1:]
    return shape[::-1] if family.transposed and role.kind == "linear" and role.layer else shape


def may_have_bias(role: Role, spec: ModelSpec) -> bool:
    """Whether a bias beside the weight means something."""
    plain = role.kind == "vector" and spec.norm in ("layer", "layer1p")
    return role.kind in ("linear", "dense") or role.biased or plain


def claim(
    infos: Mapping[str, TensorInfo],
    spec: ModelSpec,
    family: Family,
    required: frozenset[str],
    scheme: QuantScheme,
) -> Claim:
    """Match tensors to roles from the headers alone; `required` names optional roles and biases that must be there."""
    taken: dict[tuple[str, RolePlace], dict[str, str]] = {}
    missing: list[str] = []
    wrong: list[str] = []
    present = _present_somewhere(infos, spec, family, scheme) | required
    for name, role, place, base in slots(spec, family):
        own = scheme_of(role, scheme, base, infos)
        may_have = (*own.parts, *own.optional, *(("bias",) if may_have_bias(role, spec) else ()))
        parts = {s: f"{base}.{s}" for s in may_have if f"{base}.{s}" in infos}
        needed = set(own.parts) if _is_needed(name, role, spec, present) else set()
        biased = f"{name}.bias" in present and not family.may_lack(f"{name}.bias", place.layer, spec.layers)
        needed |= {"bias"} if biased else set()
        missing += [f"{base}.{s} (role {name})" for s in sorted(needed - set(parts))]
        if needed <= set(parts) and parts:
            sized = spec.at(place.layer)
            shape = disk_shape(role, sized, family) if own is DENSE else role.shape(sized)
            shapes = shape, role.shape(sized)[:1]
            wrong += _misfits(shapes, own, {s: infos[t] for s, t in parts.items()}, base, role.integers)
            taken[name, place] = parts
    left = set(infos).difference(*(p.values() for p in taken.values()))
    left = {n for n in left if not n.endswith((*IGNORED, *family.buffers)) and not n.startswith(unread(spec, family))}
    _fail("missing tensors", missing, "the download is incomplete, or config.json belongs to another model")
    _fail("tensors that do not fit", wrong, "config.json belongs to another model")
    unknown = "config.json names another model_type, or the model has a feature that is not supported"
    _fail(f"tensors that no role of {spec.family!r} takes", sorted(left), unknown)
    return Claim(taken)


def _is_needed(name: str, role: Role, spec: ModelSpec, present: frozenset[str]) -> bool:
    if name == "head":
        return not spec.tied_head or name in present
    return not role.optional or name in present


def _present_somewhere(
    infos: Mapping[str, TensorInfo], spec: ModelSpec, family: Family, scheme: QuantScheme
) -> frozenset[str]:
    """Optional roles and biases ("q.bias") that at least one layer has, so that all layers must have them."""
    found = set()
    for name, role, _, base in slots(spec, family):
        if any(f"{base}.{s}" in infos for s in scheme_of(role, scheme, base, infos).parts):
            found |= {name, role.partner or name}
        if f"{base}.bias" in infos and may_have_bias(role, spec):
            found.add(f"{name}.bias")
    return frozenset(found)


def _misfits(
    want: tuple[tuple[int, ...], tuple[int, ...]],
    scheme: QuantScheme,
    parts: Mapping[str, TensorInfo],
    base: str,
    integers: bool,
) -> Iterator[str]:
    for suffix, floats in {**scheme.parts, **scheme.optional, "bias": True}.items():
        if suffix in parts and is_float(parts[suffix].dtype) != (floats and not integers):
            needed = "floating-point" if floats and not integers else "integer"
            yield f"{base}.{suffix} is {parts[suffix].dtype}, needs {needed} numbers"
    shapes = {s: i.shape for s, i in parts.items()}
    have = scheme.shape(shapes)
    without_ones = tuple(n for n in want[0] if n != 1)
    row = len(want[0]) == 1 and tuple(n for n in have if n != 1) == without_ones
    if have not in (want[0], (math.prod(want[0]),), without_ones) and not row:
        yield f"{base}.weight is {list(have)}, the config asks for {list(want[0])}"
    if "bias" in shapes and shapes["bias"] != want[1]:
        yield f"{base}.bias is {list(shapes['bias'])}, the config asks for {list(want[1])}"


def _fail(what: str, names: list[str], likely: str) -> None:
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise ModelError(f"{what}: {'; '.join(names[:SHOWN])}{more}. Likely cause: {likely}")


def drop_layers_beyond(infos: dict[str, TensorInfo], spec: ModelSpec, family: Family) -> list[str]:
    """Take the tensors of layers beyond the config's out of `infos`, as transformers does; a note that says which."""
    notes, kept = list[str](), unread(spec, family)
    for stack, count in (("layer", spec.file_layer(spec.layers - 1) + 1), ("encoder_layer", spec.encoder.layers)):
        if stack not in family.names or not count:
            continue
        before, after = map(re.escape, family.names[stack].split("{}", 1))
        found = re.compile(rf"{before}(\d+){after}")
        layers = {n: int(m[1]) for n in infos if (m := found.match(n)) and int(m[1]) >= count}
        layers = {name: layer for name, layer in layers.items() if not name.startswith(kept)}
        for name in layers:
            del infos[name]
        if layers:
            numbers = sorted(set(layers.values()))
            notes.append(
                f"config.json has {count} layers; the files' layers {', '.join(map(str, numbers[:6]))}"
                f"{' and more' if len(numbers) > 6 else ''} ({len(layers)} tensors) are ignored"
            )
    return notes
