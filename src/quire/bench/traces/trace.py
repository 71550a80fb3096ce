"""What a trace says, whatever its layout, and how its lines are read: bounded, and refused with their numbers."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire.core.errors import ConfigError

MAX_LINE = 4 << 20
"""Bytes: a Mooncake line of a prompt of a million tokens takes 20 KB."""
MAX_TOKENS = 1 << 24
MAX_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True)
class Traced:
    """A request: seconds from any origin, tokens of prompt and answer.

    `blocks`: names of the parts of the prompt, each of `Trace.block_size` tokens but the last; equal names are equal
    tokens. `prompt`: the tokens themselves, where they were recorded.
    """

    at: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()


@dataclass
class Trace:
    """Requests in order of time, from 0 seconds. `skipped`: lines that are no answered request, as `notes` say."""

    layout: str
    requests: list[Traced] = field(default_factory=list)
    block_size: int = 0
    skipped: int = 0
    notes: list[str] = field(default_factory=list)


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of the lines that are not empty; the last may be cut off where a file is still written."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    raise ConfigError(f"{path}, line {number} is longer than {MAX_LINE:,} bytes; is it a trace?")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError:
                    raise ConfigError(f"{path}, line {number} is not UTF-8 text; is it a trace?") from None
                if text:
                    yield number, text
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror or error}", param="trace") from None


def table(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """(where, the cells of `columns`) of a CSV file's rows. `ConfigError` where the head or a row lacks one."""
    head: list[str] | None = None
    for number, text in lines_of(path):
        [cells] = csv.reader([text])
        if head is None:
            head = [cell.strip() for cell in cells]
            if missing := [column for column in columns if column not in head]:
                raise ConfigError(f"{path}, line {number} has no column {missing[0]!r}; it has {', '.join(head)[:200]}")
            continue
        where = f"{path}, line {number}"
        if len(cells) != len(head):
            raise ConfigError(f"{where} has {len(cells)} cells, the head {len(head)}")
        row = dict(zip(head, cells, strict=True))
        yield where, {column: row[column].strip() for column in columns}


def tokens(value: object, where: str, name: str, least: int = 1) -> int:
    """A number of tokens. `ConfigError` where it is none."""
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = math.nan
    if isinstance(value, bool) or not found.is_integer() or not least <= found <= MAX_TOKENS:
        raise ConfigError(f"{where}: {name} is {str(value)[:40]!r}, no number of tokens from {least} to {MAX_TOKENS:,}")
    return int(found)


def seconds(value: object, where: str, name: str) -> float:
    """A time. `ConfigError` where it is none."""
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = math.nan
    if isinstance(value, bool) or not math.isfinite(found):
        raise ConfigError(f"{where}: {name} is {str(value)[:40]!r}, not a number")
    return found
