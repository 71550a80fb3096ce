"""BurstGPT's traces (Wang et al., 2024): CSV of Timestamp (s), Model, Request tokens, Response tokens, and more.

A response of no tokens is a request that failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quire.bench.traces.trace import Traced, seconds, table, tokens

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")


def read(path: Path) -> Iterator[Traced]:
    """Read the trace's requests, in the file's order."""
    for where, row in table(path, COLUMNS):
        yield Traced(
            at=seconds(row["Timestamp"], where, "Timestamp"),
            input_tokens=tokens(row["Request tokens"], where, "Request tokens", least=0),
            output_tokens=tokens(row["Response tokens"], where, "Response tokens", least=0),
        )
