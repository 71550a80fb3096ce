"""What the store knows of each model that was pulled: a JSON file in the model's folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from quire.core.errors import ModelError
from quire.core.files import read_bounded, write_whole
from quire.store.places import folder_of, models_folder

MANIFEST = "manifest.json"
MAX_BYTES = 1 << 20
DEFAULT = "default"
"""A file in the store's folder that holds the name of the model marked as default."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A model that was pulled.

    `name`: as `quire list` shows it. `path`: a GGUF file or a model folder; relative to the model's own folder in the
    store, or absolute where it lies in the hub's cache. `source`: pypi:PACKAGE==VERSION or hub:OWNER/MODEL.
    `revision`: version or commit. `size`: bytes. `sha256`: of the file, "" for a folder. `license`: SPDX identifier, ""
    where it is not known. `kind`: chat, vectors or base. `pulled`: time, ISO 8601 in UTC.
    """

    name: str
    path: str
    source: str
    revision: str
    quantization: str
    size: int
    sha256: str = ""
    license: str = ""
    kind: str = "chat"
    pulled: str = ""

    @property
    def place(self) -> Path:
        """Where the model lies."""
        return folder_of(self.name) / self.path  # an absolute path stays as it is

    @property
    def repository(self) -> str:
        """The hub's repository, "" for a model from elsewhere."""
        return self.source.removeprefix("hub:") if self.source.startswith("hub:") else ""


def write(manifest: Manifest) -> None:
    """Add the model to the store, or replace what the store knew of it."""
    folder = folder_of(manifest.name)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def read(name: str) -> Manifest | None:
    """The model of this very name; None where none was pulled. `ModelError` for a file that cannot be read."""
    return _read(folder_of(name) / MANIFEST)


def _read(path: Path) -> Manifest | None:
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(read_bounded(path, MAX_BYTES), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path}: cannot be read: {error}; remove the folder and pull the model again") from None


def all_pulled() -> Iterator[Manifest]:
    """Models of the store, those that were pulled last first; what cannot be read is passed over."""
    found = []
    for path in models_folder().glob(f"*/{MANIFEST}"):
        with suppress(ModelError):
            manifest = _read(path)
            found += [manifest] if manifest is not None else []
    yield from sorted(found, key=lambda each: each.pulled, reverse=True)


def remove(name: str) -> None:
    """Remove the model's folder in the store, and the mark if it was the default."""
    shutil.rmtree(folder_of(name))
    if marked_default() == name:
        (models_folder() / DEFAULT).unlink()


def mark_default(name: str) -> None:
    """Have commands without a model take this one."""
    write_whole(models_folder() / DEFAULT, name.encode() + b"\n")


def marked_default() -> str:
    """Name of the model that was marked; "" where none was."""
    path = models_folder() / DEFAULT
    return path.read_text().strip() if path.is_file() else ""
