"""What `quire list`, `show` and `rm` know of models: of the store, of the hub's cache, and of their headers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError, QuireError
from quire.store.hub_cache import CachedModel, cached_models, remove_cached
from quire.store.manifest import Manifest, all_pulled, remove
from quire.store.names import all_known, default_model, find, is_path_name, several
from quire.store.places import models_folder
from quire.store.progress import amount


@dataclass(frozen=True)
class Row:
    """A line of a list: `facts` for scripts, `cells` for people, in the same order."""

    facts: dict[str, Any]
    cells: list[str]


def known_rows() -> list[Row]:
    """The catalog."""
    here = {each.name for each in all_pulled()}
    rows = []
    for name, also, mb, license, kind in all_known():
        facts = {"name": name, "size": int(mb * 1e6), "kind": kind, "license": license, "also": also}
        rows.append(
            Row(facts | {"here": name in here}, [name, amount(mb * 1e6), kind, license, also, "yes" * (name in here)])
        )
    return rows


def local_rows() -> list[Row]:
    """Models of the store, then those of the hub's cache that quire can run and that the store does not name."""
    default = default_model()
    pulled = [each for each in all_pulled() if each.place.exists()]
    rows = [_row(each, default is not None and each.name == default.name) for each in pulled]
    named = {each.place.resolve() for each in pulled}
    for model in cached_models():
        if model.path.resolve() not in named and (found := _cached(model)) is not None:
            rows.append(_row(found, False))
    return rows


def _row(each: Manifest, default: bool) -> Row:
    kept = each.quantization or "16 bits"
    modified = datetime.fromisoformat(each.pulled)
    facts = {
        "name": each.name,
        "size": each.size,
        "quantization": each.quantization,
        "kind": each.kind,
        "modified": each.pulled,
        "license": each.license,
        "source": each.source,
        "path": str(each.place),
        "default": default,
    }
    name = f"{each.name} (default)" if default else each.name
    return Row(facts, [name, amount(each.size), kept, each.kind, _ago(modified), each.license])


def _ago(then: datetime) -> str:
    """How long ago, in the largest unit that fits."""
    seconds = max(0.0, (datetime.now(UTC) - then).total_seconds())
    for name, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if (count := int(seconds // length)) >= 1:
            return f"{count} {name}{'s' * (count > 1)} ago"
    return "just now"


def _cached(model: CachedModel) -> Manifest | None:
    """A model of the hub's cache as the store would note it; None for one that quire cannot run."""
    from quire.model.describe import open_model
    from quire.store.pull import kind_of, license_of, quantization_of

    try:
        opened = open_model(str(model.path))
    except (QuireError, OSError):
        return None
    return Manifest(
        name=model.name,
        path=str(model.path),
        source=f"hub:{model.name.partition(':')[0]}",
        revision="",
        quantization=quantization_of(model.path) or ("" if not opened.quantized else opened.scheme.name),
        size=model.size,
        license=license_of(model.path),
        kind=kind_of(model.path),
        pulled=datetime.fromtimestamp(model.path.stat().st_mtime, UTC).isoformat(timespec="seconds"),
    )


def facts_of(name: str) -> dict[str, Any]:
    """What `quire show` tells of a model, from the store and from its headers; no weight is read."""
    from quire.model.describe import describe
    from quire.store.pull import kind_of, license_of, quantization_of

    noted, path = find(name), _path_of(name)
    found = describe(name if noted is not None or Path(name).exists() or name in ("", "pydoc") else str(path))
    template = template_of(name)
    marked = default_model()
    return {
        "name": noted.name if noted is not None else name,
        "architecture": found.spec.family,
        "kind": noted.kind if noted is not None else kind_of(path),
        "parameters": found.parameters,
        "context": found.spec.max_position,
        "quantization": (noted.quantization if noted is not None else "") or quantization_of(path) or found.scheme,
        "size": noted.size if noted is not None else found.bytes_on_disk,
        "license": (noted.license if noted is not None else license_of(path)) or "not named",
        "chat_template": f"{len(template):,} characters (quire show {name} --template)" if template else "none",
        "sampling": found.generation.sampling,
        "source": noted.source if noted is not None else "",
        "revision": noted.revision if noted is not None else "",
        "sha256": noted.sha256 if noted is not None else "",
        "pulled": noted.pulled if noted is not None else "",
        "default": "of commands without a model" if noted is not None and noted == marked else "",
        "path": str(path),
    }


def template_of(name: str) -> str | None:
    """The model's default chat template; None where it has none."""
    from quire.gguf.file import GgufFile
    from quire.text.template import read_templates

    path = _path_of(name)
    if path.is_file():
        found = GgufFile(path).metadata.get("tokenizer.chat_template")
        return found if isinstance(found, str) else None
    with suppress(KeyError):
        return read_templates(path)[0]["default"]
    return None


def _path_of(name: str) -> Path:
    """Where a model lies; `ModelError` for what is not on this machine: nothing is downloaded to be shown."""
    from quire.model.disk.checkpoint import resolve
    from quire.store.hub import is_hub_name

    if (noted := find(name)) is not None and noted.place.exists():
        return noted.place
    if is_hub_name(name) and not (is_path_name(name) or Path(name).expanduser().exists()):
        cached = next((each for each in cached_models() if each.name == name), None)
        if cached is None:
            raise ModelError(f"{name} is not on this machine yet. Run: quire pull {name}")
        return cached.path
    return resolve(name)


@dataclass(frozen=True)
class Removable:
    """A model that `quire rm` may remove."""

    name: str
    path: Path
    size: int
    noted: Manifest | None
    others: tuple[str, ...] = ()
    """Further names of the same files, which stay then."""

    def remove(self) -> int:
        """Remove it; bytes that came free. Files in the hub's cache stay where another pulled name needs them."""
        if self.noted is None:
            return remove_cached(self.path)
        freed = self.size
        if self.noted.repository:
            freed = remove_cached(self.path) if self.path.exists() and not self.others else 0
        remove(self.noted.name)
        return freed


def removable(name: str) -> Removable:
    """The model of this name, to be removed. `ModelError` where it is none of the store or the hub's cache."""
    if (noted := find(name)) is not None:
        return Removable(noted.name, noted.place, noted.size, noted, tuple(several(noted.name)))
    for each in cached_models():
        if each.name == name:
            return Removable(name, each.path, each.size, None)
    if Path(name).expanduser().exists():
        raise ModelError(f"{name} is no model of the store, whose folder is {models_folder()}; remove it yourself")
    raise ModelError(f"{name} is not on this machine; quire list shows what is")
