"""Models that lie in the hub's cache, whoever downloaded them: what may be one, and how to remove it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from quire.core.files import shard_number, shards_of
from quire.gguf.file import is_gguf, kind_of
from quire.store.hub_pull import hub_cache
from quire.store.pull import quantization_of


class CachedModel(NamedTuple):
    """A GGUF file or a folder with config.json in the cache, and the name by which it can be loaded."""

    name: str
    path: Path

    @property
    def files(self) -> list[Path]:
        """Files of the snapshot, each a link to a blob."""
        return shards_of(self.path) if self.path.is_file() else [p for p in self.path.rglob("*") if not p.is_dir()]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.files if file.exists())


def cached_models() -> Iterator[CachedModel]:
    """What looks like a model in the newest snapshot of each repository; nothing is read but the beginnings of GGUF
    files."""
    for repository in sorted(hub_cache().glob("models--*--*")):
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        snapshots = [path for path in repository.glob("snapshots/*") if path.is_dir()]
        if not snapshots:
            continue
        newest = max(snapshots, key=lambda path: path.stat().st_mtime)
        if (newest / "config.json").is_file() and any(newest.glob("*.safetensors")):
            yield CachedModel(name, newest)
        found = (path for path in sorted(newest.rglob("*.gguf")) if is_gguf(path))
        files = [path for path in found if shard_number(path) in (None, 1) and kind_of(path) == "model"]
        kinds = [quantization_of(path) for path in files]
        for path, kind in zip(files, kinds, strict=True):
            alone = kind and kinds.count(kind) == 1
            yield CachedModel(f"{name}:{kind}" if alone else f"{name}/{path.relative_to(newest)}", path)


def remove_cached(path: Path) -> int:
    """Remove a file or folder of a snapshot and the blobs that no other snapshot needs; bytes that came free."""
    model = CachedModel("", path)
    repository = next((p.parent for p in path.parents if p.name == "snapshots"), None)
    blobs = {file.resolve() for file in model.files if file.is_symlink()}
    freed = 0
    for file in model.files:
        freed += 0 if file.is_symlink() else file.stat().st_size
        file.unlink()
    if repository is None:
        return freed
    kept = {file.resolve() for file in repository.glob("snapshots/**/*") if file.is_symlink()}
    for blob in blobs - kept:
        with suppress(FileNotFoundError):
            size = blob.stat().st_size
            blob.unlink()
            freed += size
    for folder in sorted([*repository.rglob("*"), repository], key=lambda p: len(p.parts), reverse=True):
        if folder.is_dir() and not folder.is_symlink():
            with suppress(OSError):
                folder.rmdir()  # those that are empty now
    return freed
