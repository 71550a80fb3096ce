"""Mooncake's traces (Qin et al., FAST 2025): JSON lines of timestamp (ms), input_length, output_length, hash_ids.

Each hash id names a block of 512 tokens of the prompt and all before it; the last block may be shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from quire.bench.traces.trace import Traced, lines_of, seconds, tokens
from quire.core.errors import ConfigError

BLOCK = 512


def read(path: Path) -> Iterator[Traced]:
    """Read the trace's requests, in the file's order."""
    for number, text in lines_of(path):
        where = f"{path}, line {number}"
        try:
            found = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{where} is no JSON object")
        if missing := [name for name in ("timestamp", "input_length", "output_length") if name not in found]:
            raise ConfigError(f"{where} has no {missing[0]!r}")
        read = tokens(found["input_length"], where, "input_length")
        yield Traced(
            at=seconds(found["timestamp"], where, "timestamp") / 1e3,
            input_tokens=read,
            output_tokens=tokens(found["output_length"], where, "output_length"),
            blocks=_blocks(found.get("hash_ids") or (), read, where),
        )


def _blocks(ids: object, length: int, where: str) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or any(type(i) is not int for i in ids):
        raise ConfigError(f"{where}: hash_ids is no list of whole numbers")
    if ids and len(ids) != -(-length // BLOCK):
        raise ConfigError(f"{where}: {len(ids)} hash_ids are not the blocks of {BLOCK} that {length} tokens fill")
    return tuple(ids)
