"""JSON in pieces: writing a large reply never keeps the interpreter's lock for long, nor holds all of its values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
from msgspec import UNSET

RUN = 64
"""Items of a list that are encoded at once: of prompts' log-probabilities, 20 of each token, some 130 kB."""
PART = 256 << 10
"""Bytes that are sent at once."""


class Parts(msgspec.Struct):
    """A value whose fields are encoded one by one; a field may be an iterator, whose items are made as they are."""


def encode(value: Any) -> list[bytes]:
    """`value` as `msgspec.json.encode` writes it, in parts of some `PART` bytes. Iterators in it become lists."""
    parts: list[bytes] = []
    run: list[bytes] = []
    size = 0
    for piece in _pieces(value):
        run.append(piece)
        size += len(piece)
        if size >= PART:
            parts.append(b"".join(run))
            run, size = [], 0
    return [*parts, b"".join(run)] if run or not parts else parts


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Parts):
        lead = b"{"
        for name in value.__struct_fields__:
            if (field := getattr(value, name)) is not UNSET:
                yield b'%b"%b":' % (lead, name.encode())
                yield from _pieces(field)
                lead = b","
        yield b"}" if lead == b"," else b"{}"
    elif isinstance(value, (list, Iterator)):
        items, lead = iter(value), b"["
        while run := list(islice(items, RUN)):
            if isinstance(run[0], Parts):
                for item in run:
                    yield lead
                    yield from _pieces(item)
                    lead = b","
            else:
                yield lead + msgspec.json.encode(run)[1:-1]
                lead = b","
        yield b"]" if lead == b"," else b"[]"
    else:
        yield msgspec.json.encode(value)
