"""JSON as it comes: what is passed on is a beginning of valid JSON (RFC 8259); escapes and numbers are when whole."""

from __future__ import annotations

import json
import re
from typing import NoReturn

from quire.text.messages.text_source import Malformed, Sink, Steps, TextSource

MAX_DEPTH = 64
MAX_ATOM = 512
"""Characters of a number."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ATOM = re.compile(r"[-+.0-9A-Za-z]*")
_VALID = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')


def value(source: TextSource, sink: Sink, depth: int = 0) -> Steps[None]:
    """Read one value, white space before it not included; `Malformed` at the first character that cannot be."""
    char = yield from source.ahead(1)
    if char == '"':
        yield from string(source, sink)
    elif char and char in "{[":
        if depth >= MAX_DEPTH:
            raise Malformed
        yield from _container(source, sink, depth)
    else:
        yield from _atom(source, sink)


def string(source: TextSource, sink: Sink) -> Steps[None]:
    """Read one string with its quotes."""
    if (yield from source.ahead(1)) != '"':
        raise Malformed
    sink(source.take(1))
    while char := (yield from source.ahead(1)):
        if char == '"':
            sink(source.take(1))
            return
        if char == "\\":
            two = yield from source.ahead(2)
            whole = yield from source.ahead(6 if two == "\\u" else 2)
            if not _ESCAPE.fullmatch(whole):
                raise Malformed
            sink(source.take(len(whole)))
        elif found := _PLAIN.match(source.text, source.at):
            sink(source.take(found.end() - source.at))
        else:
            raise Malformed
    raise Malformed


def text(source: TextSource) -> Steps[str]:
    """A string, decoded."""
    held: list[str] = []
    yield from string(source, held.append)
    return str(json.loads("".join(held)))


def _gap(source: TextSource, sink: Sink) -> Steps[str]:
    """White space; the character behind it."""
    while (char := (yield from source.ahead(1))) and char in " \t\r\n":
        sink(source.take(1))
    return char


def _container(source: TextSource, sink: Sink, depth: int) -> Steps[None]:
    opener = source.take(1)
    sink(opener)
    close = "}" if opener == "{" else "]"
    if (yield from _gap(source, sink)) == close:
        sink(source.take(1))
        return
    while True:
        if close == "}":
            yield from string(source, sink)
            if (yield from _gap(source, sink)) != ":":
                raise Malformed
            sink(source.take(1))
            yield from _gap(source, sink)
        yield from value(source, sink, depth + 1)
        char = yield from _gap(source, sink)
        if char not in (",", close):
            raise Malformed
        sink(source.take(1))
        if char == close:
            return
        yield from _gap(source, sink)


def _atom(source: TextSource, sink: Sink) -> Steps[None]:
    while True:
        found = _ATOM.match(source.text, source.at)
        assert found is not None
        size = found.end() - source.at
        if size > MAX_ATOM:
            raise Malformed
        if found.end() < len(source.text) or source.ended:
            break
        yield
    if not _VALID.fullmatch(found[0]):
        raise Malformed
    sink(source.take(size))


def refuse(constant: str) -> NoReturn:
    """NaN and Infinity, which Python's reader of JSON takes, are none: `ValueError`."""
    raise ValueError(constant)
