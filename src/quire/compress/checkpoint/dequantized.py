"""Quantized checkpoints and GGUF files as plain tensors under the names of a Hugging Face folder.

`DequantizedSource` undoes the quantization; `FusedSource` puts tensors together as a family's own files have them,
which is the inverse of `quire.model.disk.renamed_tensors`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.core.dtypes import F32, I32
from quire.core.errors import ModelError
from quire.gguf.vocab import special_ids
from quire.model.disk.checkpoint import Checkpoint, TensorInfo, TensorSource
from quire.model.disk.claim import RolePlace, claim, disk_shape, drop_layers_beyond, slots
from quire.model.disk.gguf_model import GgufModel
from quire.model.disk.headers import ModelHeaders
from quire.model.disk.hf_config import read_json
from quire.model.disk.renamed_tensors import Rewrite, Rewritten
from quire.model.disk.stacked import StackedSource
from quire.model.families.find import read_spec
from quire.model.families.mtp import mtp_beginning
from quire.model.families.row import Family
from quire.model.load.reader import MatrixForm, WeightReader
from quire.model.load.roles import DISK_ROLES, FUSED, Share, disk_rows
from quire.model.spec import ModelSpec
from quire.ops.arrays import to_torch
from quire.ops.differentiable import differentiable
from quire.quant.registry import DENSE

if TYPE_CHECKING:
    from torch import Tensor


def _names(rule: Rewrite) -> re.Pattern[str]:
    """Names that `rule` gives. The group "own" is what the first of its pattern held, with which that begins.

    "expert" and "part": what took the place of each {}.
    """
    own = rule.pattern[1 : rule.pattern.index(")")]
    text = re.escape(rule.name).replace(re.escape(r"\1"), f"(?P<own>{own})", 1)
    hole = re.escape("{}")
    if (rule.stacked or rule.below) and hole in text:
        text = text.replace(hole, r"(?P<expert>\d+)", 1)
    return re.compile(text.replace(hole, f"(?P<part>{'|'.join(map(re.escape, rule.parts))})", 1))


class FusedSource:
    """A `TensorSource` of the tensors of `source` under the names of the model's release, fused and stacked as its
    files have them.

    `source` has them as rewrites name them, one for each matrix.
    """

    def __init__(self, source: TensorSource, rewrites: Sequence[Rewrite]) -> None:
        self._source = source
        self._members: dict[str, list[str]] = {}
        self.infos: dict[str, TensorInfo] = {}
        rules = [(_names(rule), rule) for rule in rewrites if rule.release]
        for name, info in source.infos.items():
            found = next(((match, rule) for names, rule in rules if (match := names.fullmatch(name))), None)
            if found is None:
                self.infos[name], self._members[name] = info, []
                continue
            match, rule = found
            whole = rule.release.replace(r"\1", match["own"])
            self._members.setdefault(whole, []).append(name)
            experts = int(match.groupdict().get("expert") or 0) + 1
            shape = (info.shape[0] * max(1, len(rule.parts)), *info.shape[1:])
            shape = shape[::-1] if rule.turns(shape[0]) else shape
            shape = (experts, *shape) if rule.stacked else (max(1, rule.below) * shape[0], *shape[1:])
            self.infos[whole] = TensorInfo(info.dtype, shape, info.file)
        self._cut = Rewritten(self, rewrites)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor `name`, put together anew each time."""
        if not self._members[name]:
            return to_torch(self._source.tensor(name))
        parts = {member: to_torch(self._source.tensor(member)) for member in self._members[name]}
        whole = torch.empty(self.infos[name].shape, dtype=next(iter(parts.values())).dtype)
        for member, tensor in parts.items():
            self._cut.part(member, whole).copy_(tensor)
        return whole

    def read_ahead(self, names: Iterable[str]) -> None:
        """Ask the system to read what the tensors `names` are made of."""
        self._source.read_ahead([member for name in names for member in self._members[name] or [name]])

    def give_back(self) -> None:
        """Give back the memory of the file's pages; tensors handed out stay valid."""
        self._source.give_back()


TURNED = {"kv_b": ("k_b", "v_b")}
"""Matrices in whose place files may have two, the first of them turned in each head."""
MADE_OF = FUSED | {holder: (holder, *parts) for holder, parts in TURNED.items()}


@dataclass(frozen=True)
class PlainCheckpoint:
    """A model as plain tensors.

    `opened`: the model with the names that roles are claimed by; `base`: the tensors under their names on disk.
    """

    opened: ModelHeaders
    base: TensorSource
    config: dict[str, Any]

    def over(self, base: TensorSource) -> tuple[ModelHeaders, Rewritten]:
        """Read the same model from `base`, which has the tensors of `self.base`; also returns the names that it reads
        there."""
        family = self.opened.family
        source = rewritten = Rewritten(base, family.rewrites)
        stacked = StackedSource(source, family, self.opened.spec.layers) if family.stacks else source
        return replace(self.opened, source=stacked), rewritten


def as_plain_checkpoint(opened: ModelHeaders) -> PlainCheckpoint:
    """Return `opened` as plain tensors: as it is where it is not quantized, with its layer that drafts; else
    dequantized, without."""
    if opened.folder.is_file():
        gguf = GgufModel.open(opened.folder)
        raw = gguf.config() | {"pad_token_id": special_ids(gguf.file).get("pad_token")}
        spec, family, config = read_spec(raw, str(opened.folder))
        return _dequantized(replace(opened, config=config), spec, family, raw)
    raw = read_json(opened.folder / "config.json")
    if opened.scheme is DENSE:
        base = Checkpoint(opened.folder)
        drafts = {name: base.infos[name] for name in draft_tensors(opened, base.infos)}
        drop_layers_beyond(base.infos, opened.spec, opened.family)
        base.infos |= drafts
        return PlainCheckpoint(opened, base, raw)
    raw.pop("quantization_config", None)
    return _dequantized(opened, opened.spec, replace(opened.family, stacks={}), raw)


def draft_tensors(opened: ModelHeaders, names: Iterable[str]) -> list[str]:
    """Return those of `names`, which lie in the model's own files, that are of its layer that drafts."""
    beginning = mtp_beginning(opened.family, opened.spec.layers) if opened.mtp is not None else ""
    return [name for name in names if beginning and name.startswith(beginning)]


def _dequantized(opened: ModelHeaders, spec: ModelSpec, family: Family, raw: dict[str, Any]) -> PlainCheckpoint:
    """The tensors as `spec` and `family` have them. `raw`: their config.json, which is told which biases there are."""
    source = DequantizedSource(opened, spec, family)
    pieces = sorted(source.present & set(opened.family.stacks))
    if pieces:
        raise ModelError(
            f"{opened.folder}: {pieces[0]} lies in pieces, which are not taken out of a quantized model; "
            "use the unquantized one"
        )
    for flag, parts in family.flags.items():
        if set(parts) <= source.present:
            raw = raw | {flag: True}
    base = FusedSource(source, family.rewrites)
    seen = Rewritten(base, family.rewrites)
    found = claim(seen.infos, spec, family, family.required_parts(opened.config), DENSE)
    made = replace(opened, spec=spec, family=family, source=seen, scheme=DENSE, claim=found, dtype=F32)
    return PlainCheckpoint(made, base, raw)


@dataclass(frozen=True)
class _Slot:
    """A tensor: part `part` ("weight" or "bias") of the role or fused matrix `holder`."""

    holder: str
    place: RolePlace
    part: str


class DequantizedSource:
    """A `TensorSource` of f32 tensors, named and laid out as `spec` and `family` say, made of those of `opened`."""

    def __init__(self, opened: ModelHeaders, spec: ModelSpec, family: Family) -> None:
        self._reader = WeightReader(opened, differentiable(), MatrixForm(F32), Share(), None)
        self._spec, self._family = spec, family
        self.infos: dict[str, TensorInfo] = {}
        self.present = set[str]()
        """Roles and biases ("q.bias") that there are."""
        self._slots: dict[str, _Slot] = {}
        file = opened.folder.name
        for holder, role, place, base in slots(spec, family):
            held = {one: self._found(one, place) for one in MADE_OF.get(holder, (holder,))}
            parts = {part for found in held.values() for part in found}
            if not parts:
                continue
            for one, found in (*held.items(), (holder, parts)):
                self.present |= {one, f"{one}.bias"} if "bias" in found else {one}
            sized = spec.at(place.layer)
            shapes = {"weight": disk_shape(role, sized, family), "bias": role.shape(sized)[:1]}
            for part in ("weight", *(("bias",) if "bias" in parts else ())):
                self.infos[f"{base}.{part}"] = TensorInfo(I32 if role.integers else F32, shapes[part], file)
                self._slots[f"{base}.{part}"] = _Slot(holder, place, part)

    def _found(self, role: str, place: RolePlace) -> Mapping[str, str]:
        found = self._reader.opened.claim
        return found.get(found.holder(role, *place), *place)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor `name` f32, or int32 where it is whole numbers, made anew each time."""
        slot = self._slots[name]
        role = DISK_ROLES[slot.holder]
        if role.integers:
            return to_torch(self._reader.read(self._reader.opened.claim.get(slot.holder, *slot.place)["weight"])).int()
        if role.kind == "vector":
            return self._vector(slot)
        if role.kind == "linear":
            return self._matrix(slot)
        names = self._reader.opened.claim.get(slot.holder, *slot.place)
        if role.kind == "dense":
            return to_torch(self._reader.read(names[slot.part])).float()
        return to_torch(self._reader.table(slot.holder))

    def _vector(self, slot: _Slot) -> Tensor:
        if slot.part == "bias":
            bias = self._reader.vector(slot.holder, slot.place.layer, "bias")
            assert bias is not None
            return to_torch(bias)
        weight = self._reader.vector(slot.holder, slot.place.layer)
        assert weight is not None
        shape = disk_shape(DISK_ROLES[slot.holder], self._spec.at(slot.place.layer), self._family)
        weight = to_torch(weight).view(shape)
        return weight - 1.0 if self._spec.stored_less_one(slot.holder) else weight

    def _matrix(self, slot: _Slot) -> Tensor:
        family, layer = self._family, slot.place.layer
        spec = self._spec.at(layer)
        if slot.holder in TURNED and not self._found(slot.holder, slot.place):
            return self._joined(TURNED[slot.holder], layer)
        whole = torch.zeros(DISK_ROLES[slot.holder].shape(spec)[: 2 if slot.part == "weight" else 1])
        for role in FUSED.get(slot.holder, (slot.holder,)):
            weight, bias = self._reader.matrix((role,), layer, slot.place.expert)
            numbers = weight.dequantize() if slot.part == "weight" else bias
            numbers = None if numbers is None else to_torch(numbers)
            rows = None
            if layer is not None:
                rotated = spec.rope[layer].dim if spec.interleaved_rope else 0
                rows = disk_rows(role, slot.holder, spec, family.grouped_qkv and slot.holder == "qkv", rotated)
            if numbers is not None:
                whole[slice(None) if rows is None else rows] = numbers
        return whole.t() if family.transposed and layer is not None and slot.part == "weight" else whole

    def _joined(self, roles: Sequence[str], layer: int | None) -> Tensor:
        """Return for each head the rows of its keys, which lie turned, and below them those of its values."""
        whole = (to_torch(self._reader.matrix((role,), layer)[0].dequantize()) for role in roles)
        keys, values = (matrix.view(self._spec.heads, -1, matrix.shape[1]) for matrix in whole)
        return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)

    def read_ahead(self, names: Iterable[str]) -> None:
        """Ask the system to read what the tensors `names` are made of."""
        for slot in (self._slots[name] for name in names):
            for role in MADE_OF.get(slot.holder, (slot.holder,)):
                self._reader.opened.source.read_ahead(self._found(role, slot.place).values())

    def give_back(self) -> None:
        """Give back the memory of the file's pages; tensors handed out stay valid."""
        self._reader.opened.source.give_back()
