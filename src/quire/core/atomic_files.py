"""Files and folders that are on the disk whole or not at all, whenever the process or the machine ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
