"""Files that a model folder may hold or lack: read within limits, and missed with the reason."""

from __future__ import annotations

from pathlib import Path

from quire.core.errors import ModelError


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
