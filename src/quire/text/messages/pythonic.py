"""Calls as a list in Python: [f(a=1, b="x"), g()]."""

from __future__ import annotations

import ast
import json
import re
import warnings

from quire.text.messages.json_values import refuse
from quire.text.messages.text_source import MAX_NAME, Malformed, Steps, TextSource

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
MAX_DEPTH = 64


def pythonic(source: TextSource, opener: str) -> Steps[None]:
    """A list of calls; where no marker announces it, only of functions that the request declares."""
    known = not opener
    yield from source.space()
    yield from source.expect("[")
    while True:
        yield from source.space()
        name = yield from _name(source, "(")
        if known and name not in (source.reading.schemas or {}):
            raise Malformed
        source.start(name)
        source.hold()
        yield from _arguments(source)
        source.hold()
        yield from source.space()
        if not (yield from source.accept(",")):
            break
    yield from source.expect("]")


def _name(source: TextSource, end: str) -> Steps[str]:
    name, _ = yield from source.until_one((end,), MAX_NAME)
    if not _IDENTIFIER.fullmatch(name.strip()):
        raise Malformed
    return name.strip()


def _arguments(source: TextSource) -> Steps[None]:
    """Each is passed on when it is whole."""
    begun = False
    while True:
        yield from source.space()
        if (yield from source.accept(")")):
            source.arguments("}" if begun else "{}")
            return
        key = yield from _name(source, "=")
        text = yield from _expression(source)
        source.arguments(f'{", " if begun else "{"}"{key}": {_json(text)}')
        begun = True
        source.hold()
        if not (yield from source.accept(",")) and (yield from source.ahead(1)) != ")":
            raise Malformed


def _expression(source: TextSource) -> Steps[str]:
    """The text of a value, up to the comma or parenthesis behind it."""
    held: list[str] = []
    open_: list[str] = []
    quote = ""
    while char := (yield from source.ahead(1)):
        if quote:
            if char == "\\":
                if len((yield from source.ahead(2))) < 2:
                    raise Malformed
                held.append(source.take(1))
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in _CLOSERS:
            open_.append(_CLOSERS[char])
            if len(open_) > MAX_DEPTH:
                raise Malformed
        elif not open_ and char in ",)":
            return "".join(held)
        elif char in ")]}" and open_.pop() != char:
            raise Malformed
        held.append(source.take(1))
    raise Malformed


def _json(text: str) -> str:
    """A literal of JSON, or of Python, as JSON; what is both is JSON, as two escapes differ."""
    text = text.strip()
    try:
        json.loads(text, parse_constant=refuse)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            value = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode().decode()
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # half a character is one
        raise Malformed from None
