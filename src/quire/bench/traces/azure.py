"""Azure's traces of LLM inference (Patel et al., ISCA 2024): CSV of TIMESTAMP, ContextTokens, GeneratedTokens."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from quire.bench.traces.trace import Traced, table, tokens
from quire.core.errors import ConfigError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(path: Path) -> Iterator[Traced]:
    """Read the trace's requests, in the file's order."""
    for where, row in table(path, COLUMNS):
        yield Traced(
            at=_time(row["TIMESTAMP"], where),
            input_tokens=tokens(row["ContextTokens"], where, "ContextTokens"),
            output_tokens=tokens(row["GeneratedTokens"], where, "GeneratedTokens", least=0),
        )


def _time(text: str, where: str) -> float:
    """Seconds since 1970 of a date with up to seven digits behind the second, UTC where nothing else is said."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{where}: TIMESTAMP is {text[:40]!r}, not like 2023-11-16 18:15:46.6805900") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
