"""Files: read within limits, missed with the reason, and written so that they are there whole or not at all."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import ModelError

LoadProgress = Callable[[int, int, str], None]
"""Called with (done bytes, total bytes, what is being loaded)."""
WEIGHTS = (".safetensors", ".gguf", ".json")
SAMPLE = 64 << 10
"""Bytes of a file that are looked at, three times."""
MAX_FILE_BYTES = 128 * 2**20
"""The largest file of text that is read."""


SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def shard_number(path: Path) -> int | None:
    """Which file of a model in several ones (-00001-of-00003.gguf) it is by its name; None for a model in one file."""
    found = SHARD.fullmatch(path.name)
    return None if found is None else int(found[2])


def shards_of(path: Path) -> list[Path]:
    """The files of the model that `path` is the first file of, by its name; they may be missing."""
    found = SHARD.fullmatch(path.name)
    if found is None:
        return [path]
    return [path.with_name(f"{found[1]}-{i + 1:05}-of-{found[3]}.gguf") for i in range(int(found[3]))]


def read_bounded(path: Path, limit: int) -> bytes:
    """What the file holds; `ModelError` for more than `limit` bytes, which a device without an end has too."""
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ModelError(f"{path} is larger than {limit:,} bytes, the limit for such a file")
    return data


def why_missing(path: Path, otherwise: str) -> str:
    """What is wrong with a file that cannot be read: that it is a link to nowhere, or else `otherwise`."""
    if path.exists() or not path.is_symlink():
        return f"{path} {otherwise}"
    return f"{path} is a symbolic link to {path.readlink()}, which is not there; mend the link or copy the file"


def read_text(path: Path) -> str:
    """The file's text (UTF-8, at most 128 MiB); `ModelError` names the file."""
    try:
        return read_bounded(path, MAX_FILE_BYTES).decode()
    except OSError as error:
        raise ModelError(why_missing(path, f"cannot be read: {error.strerror}")) from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not UTF-8 text at byte {error.start}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The file's JSON object; {} if there is no such file."""
    if not (path.exists() or path.is_symlink()):
        return {}
    try:
        return msgspec.json.decode(read_text(path), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"{path}: is not a JSON object: {error}") from None


def sampled_digest(model: Path) -> str:
    """Digest of a model's folder or file: names and sizes of files with weights, and bytes from each one's beginning,
    middle and end. Copies of one model have the same; another one with the same shapes has not, but for odds nobody
    meets."""
    files = shards_of(model) if model.is_file() else sorted(f for f in model.iterdir() if f.suffix in WEIGHTS)
    found = hashlib.blake2b(digest_size=16)
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name}\n{size}\n".encode())
        with path.open("rb") as file:
            for at in (0, size // 2, max(0, size - SAMPLE)):
                file.seek(at)
                found.update(file.read(SAMPLE))
    return found.hexdigest()


@contextmanager
def becoming(path: Path) -> Iterator[Path]:
    """A name to write to; the file becomes `path` when it is on the disk, or goes. `OSError` as of writing."""
    part = path.with_name(path.name + ".tmp")
    try:
        yield part
        sync(part)
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    sync(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, on the disk when this returns; `OSError` as of writing."""
    with becoming(path) as part:
        part.write_bytes(data)


def sync(path: Path) -> None:
    """Have a file or folder on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Have everything below `folder` on the disk."""
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink():
            sync(path)
