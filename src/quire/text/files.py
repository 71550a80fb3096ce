"""Reading a model folder's small text files, with limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import ModelError
from quire.core.files import read_bounded, why_missing

MAX_FILE_BYTES = 128 * 2**20


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
