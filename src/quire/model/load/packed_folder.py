"""The folder of packed caches: where it is, how large it may become, and which files make room for a new one.

Little is imported for it, so that the system reads a file while the engine is imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from pathlib import Path
from threading import Thread

from quire.core.config import ModelConfig
from quire.core.files import shards_of
from quire.core.machine import cache_folder
from quire.model.disk.checkpoint import read_ahead
from quire.store.names import local_path

PREFIX, SUFFIX = "packed-", ".safetensors"
STALE_SECONDS = 600
"""Since the last write to a file without its final name: a writer that lives writes every few milliseconds."""
FREE_SHARE = 10
"""A tenth of the disk stays free."""

AHEAD = 4 << 30
"""Bytes of a model that are asked for before it is opened."""


class NoRoom(Exception):
    """The file would be too large; the message says for what."""


def folder_of(options: ModelConfig) -> Path:
    """Where the packed weights of a model are kept, unless off."""
    return cache_folder() / "packed" if options.cache_packed == "auto" else Path(options.cache_packed).expanduser()


def beginning(options: ModelConfig) -> str:
    """What names of files begin with that were made under the same options."""
    return f"{PREFIX}{options.quantization or 'none'}-g{options.group_size}-"


def ending(first: Path) -> str:
    """What names of files end with that were made of the model whose first file is `first`."""
    return f"-{hashlib.blake2b(str(first.resolve()).encode(), digest_size=6).hexdigest()}{SUFFIX}"


def ask_ahead(options: ModelConfig) -> None:
    """Have the system read what the load will begin with, while imports keep a core busy; a wrong guess costs nothing.

    That is the packed file if there is one, or else the model's own.
    """
    model = local_path(options.model)
    files = shards_of(model) if model.is_file() else sorted(model.glob("*.safetensors")) if options.model else []
    if not files or options.load_format == "dummy":
        return
    if options.cache_packed != "off":
        pattern = f"{beginning(options)}*{ending(files[0])}"
        files = sorted(folder_of(options).glob(pattern), key=lambda path: -path.stat().st_mtime)[:1] or files
    Thread(target=_read_ahead, args=(files,), daemon=True).start()


def _read_ahead(files: list[Path]) -> None:
    left = AHEAD
    for path in files:
        with contextlib.suppress(OSError):  # whoever opens it will say so
            size = min(left, path.stat().st_size)
            read_ahead(path, [(0, size)])
            left -= size


def mark_used(path: Path) -> None:
    """Make the file the last that makes room for another; not where that is forbidden."""
    with contextlib.suppress(OSError):
        os.utime(path)


def remove_leftovers(folder: Path) -> None:
    """Remove what writers left that were killed."""
    for left in folder.glob(f".{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process may be faster
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                left.unlink()


def make_room(path: Path, size: int, most: int) -> None:
    """Remove the files least recently used until `path` may have `size` bytes; `NoRoom` when that is not enough.

    All files have `most` bytes at most, and half of what the disk would have without them. Nothing is removed in vain.
    Whoever reads or has mapped a file that is removed keeps it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    disk, found = shutil.disk_usage(path.parent), list[tuple[float, int, Path]]()
    for other in path.parent.glob(f"{PREFIX}*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            status = other.stat()
            if other != path:
                found.append((status.st_mtime, status.st_size, other))
    held = sum(bytes_ for _, bytes_, _ in found)
    most, least_free = min(most, (disk.free + held) // 2), disk.total // FREE_SHARE
    if size > most:
        raise NoRoom(f"they need {size:,} bytes, {most:,} are allowed (--cache-packed-gib, half of the free disk)")
    gone, freed = list[Path](), 0
    for _, bytes_, other in sorted(found):
        if held - freed + size <= most and disk.free + freed - size >= least_free:
            break
        gone.append(other)
        freed += bytes_
    if disk.free + freed - size < least_free:
        raise NoRoom(f"they need {size:,} bytes, which would leave less than a tenth of the disk free")
    for other in gone:
        other.unlink(missing_ok=True)
