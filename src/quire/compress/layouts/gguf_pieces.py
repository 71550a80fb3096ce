"""The tensors of a GGUF file that a model folder becomes: what each holds, of which matrices, and in which order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import ConfigError
from quire.model.disk.claim import RolePlace
from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_names import BIASES, NAKED, PARTED
from quire.model.disk.headers import ModelHeaders
from quire.model.load.roles import DISK_ROLES, FUSED, GROUPED, disk_rows
from quire.model.mixers.attention import KEY_VALUE
from quire.model.role import COLUMNS
from quire.model.spec import ModelSpec
from quire.ops.arrays import as_f32, to_numpy

STACKED = re.compile(r"\.(\{\}|\d+)$")
"""Where names of matrices have the number of one that lies in a tensor of several."""
Order = NDArray[np.int64] | None
"""Which row, or column, of the folder's lies at each place of the file; None: all as they lie."""


@dataclass(frozen=True)
class Piece:
    """One tensor of the file: of `role` in `layer`, part "weight" or "bias", of one matrix or of all experts.

    `of`: the model, or its layer that drafts. `holder`: the matrix of the folder that has the role's rows, or the role.
    """

    of: ModelHeaders
    name: str
    role: str
    holder: str
    layer: int | None
    part: str
    bases: tuple[str, ...]
    parts: tuple[Mapping[str, str], ...]


def pieces_of(opened: ModelHeaders, architecture: Architecture, names: Mapping[str, str]) -> list[Piece]:
    """What becomes of the tensors of `opened`, by `names` of roles; `ConfigError` for a role without one."""
    found: dict[str, list[tuple[str, Mapping[str, str]]]] = {}
    keys: dict[str, tuple[str, str, int | None, str]] = {}
    naked = (*NAKED, *architecture.naked)
    for role, holder, place, parts in _roles(opened, architecture):
        if role not in names:
            raise ConfigError(f"{opened.folder}: {next(iter(parts.values()))} has no name in GGUF ({role})")
        if role in architecture.unbiased and "bias" in parts:
            raise ConfigError(f"{opened.folder}: llama.cpp reads no {parts['bias']} of such models; keep the folder")
        base = _base(parts)
        stack = "encoder_layer" if DISK_ROLES[role].encoder else "layer"
        prefix = "" if place.layer is None else names[stack].format(opened.spec.file_layer(place.layer))
        for part in ("weight", *(("bias",) if "bias" in parts else ())):
            called = "" if role in naked else ".bias" if role in BIASES else f".{part}"
            name = f"{prefix}{STACKED.sub('', names[role])}{called}"
            found.setdefault(name, []).append((base, parts))
            keys[name] = role, holder, place.layer, part
    made = [
        Piece(opened, name, role, role, layer, "weight", (name,), ({},))
        for layer in range(opened.spec.layers)
        for role in architecture.made
        for name in (f"{names['layer'].format(opened.spec.file_layer(layer))}{names[role]}.weight",)
    ]
    return made + [
        Piece(opened, name, *keys[name], tuple(base for base, _ in each), tuple(parts for _, parts in each))
        for name, each in found.items()
    ]


def _roles(opened: ModelHeaders, architecture: Architecture) -> Iterator[tuple[str, str, RolePlace, Mapping[str, str]]]:
    """Roles of the file, the matrix of the folder that has their rows, and its tensors."""
    parted = {**PARTED, **architecture.parted}
    for (holder, place), parts in opened.claim.parts.items():
        if holder in architecture.vectors:
            continue
        for role in parted.get(holder, (holder,)):
            yield role, holder, place, parts
    spec = opened.spec
    for layer in range(spec.layers) if architecture.all_keys else ():
        source = spec.kv_layer(layer)
        for role in KEY_VALUE if source != layer else ():
            if parts := opened.claim.get(role, source):
                yield role, role, RolePlace(layer), parts
    if "head" in architecture.required and not opened.claim.get("head") and (parts := opened.claim.get("embed")):
        yield "head", "embed", RolePlace(), parts


def lists_of(opened: ModelHeaders, architecture: Architecture) -> dict[str, NDArray[np.float32]]:
    """Vectors of one number that files have as lists with an entry for each layer, by key."""
    layers, found = range(opened.spec.layers), dict[str, NDArray[np.float32]]()
    for role, key in architecture.vectors.items():
        tensors = [opened.source.tensor(opened.claim.get(role, layer)["weight"]) for layer in layers]
        found[key] = np.concatenate([to_numpy(as_f32(tensor)).reshape(1) for tensor in tensors])
    return found


def _base(parts: Mapping[str, str]) -> str:
    """Return the name of a layer, from that of one of its tensors."""
    suffix, name = next(iter(parts.items()))
    return name.removesuffix(f".{suffix}")


def rows_of(piece: Piece, architecture: Architecture) -> Order:
    """The order in which rows of a matrix or vector lie."""
    roles = FUSED.get(piece.role, (piece.role,))
    if piece.layer is None or (piece.holder == piece.role and piece.role in GROUPED):
        return None
    found = []
    for role in roles:
        ours = _in_folder(piece, role)
        theirs = _in_file(piece, role, architecture)
        found.append(ours if theirs is None else ours[theirs])
    rows = np.concatenate(found)
    whole = DISK_ROLES[piece.holder].shape(piece.of.spec.at(piece.layer))[0]
    return None if len(rows) == whole and (rows == np.arange(whole)).all() else rows


def _in_folder(piece: Piece, role: str) -> NDArray[np.int64]:
    """Rows of the folder's matrix that are `role`, in our order."""
    spec, layer = piece.of.spec.at(piece.layer), piece.layer
    assert layer is not None
    grouped = piece.of.family.grouped_qkv and piece.holder == "qkv"
    rows = disk_rows(role, piece.holder, spec, grouped, _turned(spec, layer) if spec.interleaved_rope else 0)
    rows = np.arange(DISK_ROLES[role].shape(spec)[0], dtype=np.int64) if rows is None else rows
    order = piece.of.family.order(role, spec) if DISK_ROLES[role].shard != COLUMNS else None
    return rows if order is None else rows[order]


def _turned(spec: ModelSpec, layer: int) -> int:
    """Numbers of a head that turn; where none does, all lie as if they did."""
    return spec.rope[layer].dim or spec.head_dim


def _in_file(piece: Piece, role: str, architecture: Architecture) -> Order:
    """Which of our rows of `role` is each row of the file."""
    spec, layer = piece.of.spec.at(piece.layer), piece.layer
    assert layer is not None
    if role in architecture.orders and DISK_ROLES[role].shard != COLUMNS:
        return architecture.orders[role](spec).argsort()
    if architecture.interleaved and role in ("q", "k"):
        turned = disk_rows(role, role, spec, False, _turned(spec, layer))
        return None if turned is None else turned.argsort()
    return None


def columns_of(piece: Piece, architecture: Architecture) -> Order:
    """The order in which columns of a matrix lie."""
    if DISK_ROLES[piece.role].shard != COLUMNS:
        return None
    spec = piece.of.spec.at(piece.layer)
    ours = piece.of.family.order(piece.role, spec)
    theirs = architecture.orders[piece.role](spec).argsort() if piece.role in architecture.orders else None
    return theirs if ours is None else ours if theirs is None else ours[theirs]


def shape_of(piece: Piece, architecture: Architecture) -> tuple[int, ...]:
    """The shape of the tensor, slowest axis first."""
    own = architecture.shapes.get(piece.role)
    shape = (own or DISK_ROLES[piece.role].shape)(piece.of.spec.at(piece.layer))
    shape = shape[:1] if piece.part == "bias" else shape
    return (len(piece.bases), *shape) if DISK_ROLES[piece.role].experts or len(piece.bases) > 1 else shape
