"""The catalog: names that people type, and where the models lie that are meant by them (`catalog.toml`)."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

QUANTIZATION = re.compile(r"[-:](?P<kind>(?:I?Q\d(?:_\w+)?|B?F16|FP16|F32|MXFP4))", re.IGNORECASE)
"""The end of a name that asks for another quantization than the default one: qwen3:4b-q8_0."""
LATEST = ":latest"
CATALOG = Path(__file__).with_name("catalog.toml")

Kind = Literal["chat", "vectors", "base"]


class PythonFile(msgspec.Struct, frozen=True):
    """A wheel on the Python index, and the model and license in it; sizes in bytes, digests in hexadecimal.

    `model`: a GGUF file, or the zip file of a model folder. `license_file`: "" for a wheel that has none.
    """

    package: str
    version: str
    file: str
    sha256: str
    size: int
    model: str
    model_sha256: str
    model_size: int
    license_file: str = ""


class CatalogEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model of the catalog; `catalog.toml` says what the fields are."""

    mb: int
    context: int
    license: str
    hub: str = ""
    quantization: str = ""
    kind: Kind = "chat"
    also: tuple[str, ...] = ()
    sampling: dict[str, float] = {}
    python: PythonFile | None = None


class CatalogPick(NamedTuple):
    """What a name means: the entry's own name, the entry, and a quantization that is not its default, or ""."""

    name: str
    entry: CatalogEntry
    quantization: str = ""

    @property
    def stored_name(self) -> str:
        """The name under which the store keeps it: one for each quantization."""
        between = "-" if ":" in self.name else ":"
        return self.name + (f"{between}{self.quantization.lower()}" if self.quantization else "")

    @property
    def hub_name(self) -> str:
        """The model's name on the hub: owner/model, or owner/model:QUANTIZATION of GGUF files."""
        kind = self.quantization or self.entry.quantization
        return f"{self.entry.hub}:{kind}" if kind else self.entry.hub


class _Catalog(msgspec.Struct, forbid_unknown_fields=True):
    models: dict[str, CatalogEntry]


@cache
def catalog() -> dict[str, CatalogEntry]:
    """Every model by its own name."""
    return msgspec.toml.decode(CATALOG.read_bytes(), type=_Catalog).models


@cache
def _names() -> dict[str, str]:
    """Own name by every name, in small letters."""
    return {each.lower(): name for name, entry in catalog().items() for each in (name, *entry.also)}


def known_names() -> list[str]:
    """All names of the catalog."""
    return list(_names())


def look_up(name: str) -> CatalogPick | None:
    """What a name means, in any letters, with `:latest` or a quantization at its end; None where it is not known."""
    asked = name.lower().removesuffix(LATEST)
    if asked in _names():
        own = _names()[asked]
        return CatalogPick(own, catalog()[own])
    found = re.fullmatch(rf"(?P<name>.+?){QUANTIZATION.pattern}", asked, re.IGNORECASE)
    if found is None or found["name"] not in _names():
        return None
    own, kind = _names()[found["name"]], found["kind"].upper()
    entry = catalog()[own]
    if kind == entry.quantization.upper():
        return CatalogPick(own, entry)
    return CatalogPick(own, entry, kind) if entry.quantization and entry.hub else None
