"""Rows in files: JSON lines, which a run appends to and goes on from, and Parquet (pyarrow) for other tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import ConfigError
from quire.core.files import becoming, write_whole
from quire.figures.schema import SCHEMA, FigureRow

MAX_BYTES = 1 << 30
STRUCTURED = ("machine", "engine", "model", "load")
"""Fields that are columns for each of their parts in Parquet; other nested ones are JSON."""


def read_rows(path: Path) -> list[FigureRow]:
    """Rows of a .jsonl or .parquet file. `ConfigError` names the line that is none.

    The last line may be cut off, as a run that was killed leaves it: it counts as not there.
    """
    try:
        if path.suffix == ".parquet":
            return [_decode(found, f"{path}, row {at}") for at, found in enumerate(_from_parquet(path), 1)]
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES:,} bytes; is it a file of rows?")
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    rows = []
    for at, line in enumerate(lines[:-1], 1):
        if line.strip():
            try:
                found = msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}, line {at} is not JSON: {error}") from None
            rows.append(_decode(found, f"{path}, line {at}"))
    return rows


def _decode(found: Any, where: str) -> FigureRow:
    version = found.get("schema") if isinstance(found, dict) else None
    if isinstance(version, int) and version > SCHEMA:
        raise ConfigError(f"{where} has schema {version}, this quire knows {SCHEMA}; use a newer one")
    try:
        return msgspec.convert(found, FigureRow)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where} is no row: {error}") from None


class Appending:
    """Rows added to a .jsonl file one by one, each on the disk before the next is measured; `have`: keys there are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = read_rows(path) if path.exists() else []
        self.have = {row.key for row in rows}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.read_bytes().endswith(b"\n"):
                write_whole(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from None

    def add(self, row: FigureRow) -> None:
        """Append one; `ConfigError` where the disk refuses."""
        try:
            with self.path.open("ab") as out:
                out.write(msgspec.json.encode(row) + b"\n")
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror or error}") from None
        self.have.add(row.key)


def write_rows(path: Path, rows: Iterable[FigureRow]) -> None:
    """A whole .jsonl or .parquet file."""
    try:
        if path.suffix == ".parquet":
            _to_parquet(path, list(rows))
        else:
            write_whole(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("Parquet needs pyarrow: pip install 'quire[records]', or name a .jsonl file") from None
    return pyarrow


def _to_parquet(path: Path, rows: list[FigureRow]) -> None:
    """Metrics are columns of numbers, `metrics.NAME`; what else is nested is JSON text."""
    pyarrow = _pyarrow()
    flat = [dict(_flat(msgspec.to_builtins(row))) for row in rows]
    names = dict.fromkeys(name for row in flat for name in row)
    table = pyarrow.table({name: [row.get(name) for row in flat] for name in names})
    with becoming(path) as part:
        pyarrow.parquet.write_table(table, part)


def _flat(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if name in STRUCTURED:
            parts = value.items()
        elif name == "metrics":
            yield from ((f"metrics.{part}", float(number)) for part, number in value.items())
            continue
        else:
            parts = [("", value)]
        for part, inner in parts:
            nested = isinstance(inner, dict | list)
            yield f"{name}.{part}".rstrip("."), msgspec.json.encode(inner).decode() if nested else inner


def _from_parquet(path: Path) -> Iterator[dict[str, Any]]:
    pyarrow = _pyarrow()
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path} is no Parquet file: {error}") from None
    nested = {"machine.limits", "engine.versions", "options", "intervals", "samples", "dialect", "notes"}
    for flat in table.to_pylist():
        row: dict[str, Any] = {"metrics": {}}
        for name, value in flat.items():
            if value is None:
                continue
            head, _, part = name.partition(".")
            value = msgspec.json.decode(value) if name in nested else value
            if part:
                row.setdefault(head, {})[part] = value
            else:
                row[name] = value
        yield row
