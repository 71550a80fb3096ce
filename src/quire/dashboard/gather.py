"""The rows of files and folders, each with where it lies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.core.errors import ConfigError
from quire.figures.files import read_rows
from quire.figures.schema import FigureRow

SUFFIXES = (".jsonl", ".parquet")
MAX_ROWS = 200_000
"""What a browser still draws within a second or two."""


@dataclass(frozen=True)
class File:
    """`name`: below the folder that all files are in."""

    name: str
    rows: list[FigureRow]


def found(paths: Iterable[Path]) -> list[Path]:
    """The files of rows that `paths` name: themselves, or what lies in a folder. `ConfigError` for what is neither."""
    files: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            inside = sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES and each.is_file())
            if not inside:
                raise ConfigError(f"{path} holds no file of rows ({' or '.join(SUFFIXES)})")
            files |= dict.fromkeys(inside)
        elif not path.exists():
            raise ConfigError(f"{path}: there is no such file or folder")
        elif path.suffix not in SUFFIXES:
            raise ConfigError(f"{path}: rows lie in files that end with {' or '.join(SUFFIXES)}; import others first")
        else:
            files[path] = None
    return list(files)


def gather(paths: Sequence[Path]) -> list[File]:
    """What they hold. `ConfigError` as of reading, and for more than `MAX_ROWS` rows."""
    files, count = [], 0
    all_of_them = found(paths)
    shared = os.path.commonpath([path.absolute().parent for path in all_of_them]) if all_of_them else ""
    for path in all_of_them:
        rows = read_rows(path)
        count += len(rows)
        if count > MAX_ROWS:
            raise ConfigError(f"there are more than {MAX_ROWS:,} rows; name fewer files")
        files.append(File(os.path.relpath(path.absolute(), shared), rows))
    return files


def stamp(paths: Iterable[Path]) -> str:
    """Changes when a file does, or one comes or goes. `ConfigError` as of `found`."""
    seen = []
    for path in found(paths):
        try:
            facts = path.stat()
        except OSError:
            continue  # it went just now: the next look does not find it
        seen.append(f"{path}:{facts.st_mtime_ns}:{facts.st_size}")
    return "\n".join(seen)
