"""Pulls from the Hugging Face hub into the hub's own cache, which other programs share: with room and progress."""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from quire.core.errors import ModelError
from quire.core.files import shards_of
from quire.store.hub import FILES, Hub, download, repository_of, wanted_files
from quire.store.progress import DownloadProgress
from quire.store.transfer import CHUNK, check_space

SHA256 = re.compile(r"[0-9a-f]{64}")
POLL_SECONDS = 0.5
logger = logging.getLogger("quire.store")


class Pulled(NamedTuple):
    """What lies in the hub's cache: a GGUF file or a folder, its commit, its bytes, and a file's digest ("" of a
    folder)."""

    path: Path
    revision: str
    size: int
    sha256: str


def pull_from_hub(name: str, hub: Hub, progress: DownloadProgress) -> Pulled:
    """Download owner/model, owner/model:QUANTIZATION or owner/model/FILE.gguf.

    `ModelError` where the hub, the network, the disk or a digest is in the way, and what to do then.
    """
    folder = _cache_of(name, hub)
    sizes = _sizes(name, hub)
    before = _bytes_in(folder)
    missing = sum(size for blob, size in sizes.items() if not (folder / "blobs" / blob).exists())
    check_space(folder, missing - _bytes_in(folder, unfinished=True))
    if missing:
        progress.begin(name, missing, 0)
        with _watched(folder, before, progress):
            path = download(name, hub)
    else:
        path = download(name, hub)
    files = shards_of(path) if path.is_file() else _files(path)
    blob = path.resolve().name
    digest = blob if len(files) == 1 and path.is_file() and SHA256.fullmatch(blob) else ""
    if digest and missing:
        _check_digest(path, digest)
    return Pulled(path, _revision(path), sum(file.stat().st_size for file in files), digest)


def _files(folder: Path) -> list[Path]:
    """The model's files in a folder of the cache."""
    return [p for p in folder.iterdir() if p.is_file() and any(fnmatch.fnmatch(p.name, f) for f in FILES)]


def _cache_of(name: str, hub: Hub) -> Path:
    """Where the cache keeps the repository."""
    return hub_cache(hub.folder) / f"models--{repository_of(name).replace('/', '--')}"


def hub_cache(folder: str | None = None) -> Path:
    """The folder of the hub's cache: `folder`, or that which huggingface_hub has by its own variables."""
    if folder:
        return Path(folder)
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return Path.home() / ".cache" / "huggingface" / "hub"
    return Path(HF_HUB_CACHE)


def _sizes(name: str, hub: Hub) -> dict[str, int]:
    """Bytes of each file that the name asks for, by the name of its blob in the cache; none where the hub does not
    say it: then the download itself tells why."""
    try:
        from huggingface_hub import HfApi

        info: Any = HfApi().model_info(repository_of(name), revision=hub.revision, files_metadata=True, timeout=30)
    except Exception as error:
        logger.debug("the hub does not tell sizes of %s: %s", name, error)
        return {}
    patterns = wanted_files(name, hub)
    wanted = [s for s in info.siblings if any(fnmatch.fnmatchcase(s.rfilename, p) for p in patterns)]
    return {(s.lfs.sha256 if s.lfs else s.blob_id): s.size or 0 for s in wanted}


def _bytes_in(folder: Path, unfinished: bool = False) -> int:
    """Bytes of the repository's files in the cache; `unfinished`: of those alone whose download was cut off."""
    total = 0
    for path in (folder / "blobs").glob("*.incomplete" if unfinished else "*"):
        try:
            total += path.stat().st_size
        except OSError:  # finished, and renamed, meanwhile
            continue
    return total


@contextmanager
def _watched(folder: Path, before: int, progress: DownloadProgress) -> Iterator[None]:
    """Show how the cache grows; huggingface_hub's own bars are off meanwhile, whose form depends on its version."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_SECONDS):
            progress.reach(max(0, _bytes_in(folder) - before))

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        if shown:
            enable_progress_bars()


def _check_digest(path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    if digest.hexdigest() != expected:
        path.resolve().unlink()
        path.unlink()
        raise ModelError(
            f"{path}: wrong digest: its sha256 is {digest.hexdigest()}, the hub says {expected}. The file was removed; "
            "run the same command again"
        )


def _revision(path: Path) -> str:
    """The commit of a file or folder in the cache."""
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else ""
