"""Files that a model folder may hold or lack: read within limits, and missed with the reason."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quire.core.errors import ModelError

WEIGHTS = (".safetensors", ".gguf", ".json")
SAMPLE = 64 << 10
"""Bytes of a file that are looked at, three times."""


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


def sampled_digest(model: Path) -> str:
    """Digest of a model's folder or file: names and sizes of files with weights, and bytes from each one's beginning,
    middle and end. Copies of one model have the same; another one with the same shapes has not, but for odds nobody
    meets."""
    files = [model] if model.is_file() else sorted(f for f in model.iterdir() if f.suffix in WEIGHTS)
    found = hashlib.blake2b(digest_size=16)
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name}\n{size}\n".encode())
        with path.open("rb") as file:
            for at in (0, size // 2, max(0, size - SAMPLE)):
                file.seek(at)
                found.update(file.read(SAMPLE))
    return found.hexdigest()
