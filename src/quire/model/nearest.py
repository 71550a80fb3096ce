"""The row that a model without one is nearest to: by the names of its tensors, and by that of its type.

Names say which parts a model has, so the row whose roles take most of them is the one to begin a new row from. They do
not say what its code computes: a model whose every tensor has a role may still be another one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from quire.core.errors import ModelError
from quire.model.disk.checkpoint import TensorSource
from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_architectures import ARCHITECTURES
from quire.model.disk.gguf_model import names_of
from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewritten
from quire.model.families.multimodal import MULTIMODAL
from quire.model.families.row import Family
from quire.model.families.table import FAMILIES
from quire.model.load.roles import DISK_ROLES

SHOWN = 6
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Nearest:
    """`row`: its name. Of `kinds` kinds of tensors (those of all layers are one kind) its roles take all but `left`.

    `unused`: roles for which there is no tensor.
    """

    row: str
    kinds: int
    left: tuple[str, ...]
    unused: int = 0

    @property
    def said(self) -> str:
        """A sentence about it."""
        if not self.kinds:
            return f"{self.row}, by its name"
        if not self.left:
            return f"{self.row}: its roles take all {self.kinds} kinds of tensors"
        more = f" and {len(self.left) - SHOWN} more" if len(self.left) > SHOWN else ""
        taken, left = self.kinds - len(self.left), ", ".join(self.left[:SHOWN])
        return f"{self.row}: its roles take {taken} of {self.kinds} kinds of tensors, not {left}{more}"


def nearest_family(name: str, raw: Mapping[str, Any], source: TensorSource | None) -> Nearest:
    """The row of the families table for a config.json `raw` of model type `name`; `source`: its tensors, if here."""
    names = (name, *_stems(raw))
    if source is None or not source.infos:
        return Nearest(max((*FAMILIES, *MULTIMODAL), key=lambda row: _alike(names, row)), 0, ())
    found = []
    for row, family in _families(raw):
        try:
            family = family.named_as(source.infos)
            seen = Rewritten(source, family.rewrites).infos
        except ModelError:  # shapes that this row's rewrites cannot part
            continue
        found.append(_taken(row, family.names, seen))
    return _best(names, found)


def nearest_architecture(name: str, source: TensorSource) -> Nearest:
    """The architecture of GGUF files for the tensors of a file whose own is `name`."""
    found = []
    for row, architecture in ARCHITECTURES.items():
        seen = Rewritten(source, architecture.seen).infos
        for family in _rows(architecture):
            for own in architecture.joined.values() or ({},):
                called = {**architecture.names, **own}
                names = {**names_of(family.names, source.infos, called), **called}
                found.append(_taken(row, names, seen))
    return _best((name,), found)


def _families(raw: Mapping[str, Any]) -> Iterator[tuple[str, Family]]:
    for row, family in FAMILIES.items():
        made = _made(family, raw)
        if made is not None:
            yield row, made


def _rows(architecture: Architecture) -> Iterator[Family]:
    for row in architecture.rows:
        made = _made(FAMILIES[row], {})
        if made is not None:
            yield made


def _made(row: Any, raw: Mapping[str, Any]) -> Family | None:
    """The row for a config.json; None where it depends on what the file lacks."""
    if isinstance(row, Family):
        return row
    try:
        made: Family = row(HfConfig(raw, ""))
    except Exception:  # a reader of another model's fields, whatever it stumbles over
        return None
    return made


def _taken(row: str, names: Mapping[str, str], tensors: Collection[str]) -> Nearest:
    """How many kinds of `tensors` a row takes that calls roles `names`."""
    bases = set()
    for role, base in names.items():
        if role in DISK_ROLES:
            stack = "encoder_layer" if DISK_ROLES[role].encoder else "layer"
            bases.add((names.get(stack, "") if DISK_ROLES[role].layer else "") + base)
    kinds = sorted({_NUMBER.sub("{}", name) for name in tensors})
    left = [kind for kind in kinds if kind.rpartition(".")[0] not in bases]
    return Nearest(row, len(kinds), tuple(left), len(bases - {kind.rpartition(".")[0] for kind in kinds}))


def _best(names: Collection[str], found: Collection[Nearest]) -> Nearest:
    """The one that leaves least, then the one whose name is most alike, then the one that lacks least."""
    return min(found, key=lambda each: (len(each.left), -_alike(names, each.row), each.unused))


def _stems(raw: Mapping[str, Any]) -> list[str]:
    """Names of the classes of a config.json less what the class does: "Qwen2" of Qwen2ForCausalLM."""
    given = raw.get("architectures")
    return [name.partition("For")[0] for name in given if isinstance(name, str)] if isinstance(given, list) else []


def _alike(names: Collection[str], row: str) -> float:
    """How alike a row's name and that of `names` are which is most so."""
    return max(SequenceMatcher(None, name.lower(), row.lower()).ratio() for name in names)
