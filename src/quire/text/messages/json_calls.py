"""Calls as JSON objects: {"name": ..., "arguments": {...}}, alone or in a list, between markers."""

from __future__ import annotations

import json

from quire.text.messages import json_values
from quire.text.messages.text_source import MAX_NAME, Malformed, Steps, TextSource

ARGUMENTS = ("arguments", "parameters")


def calls(source: TextSource, known: bool = False) -> Steps[None]:
    """One call, or a list of calls. `known`: only of functions that the request declares."""
    if not (yield from source.accept("[")):
        yield from call(source, known)
        return
    while True:
        yield from source.space()
        yield from call(source, known)
        yield from source.space()
        if not (yield from source.accept(",")):
            break
    yield from source.expect("]")


def call(source: TextSource, known: bool = False) -> Steps[None]:
    """One object; its arguments stream where the name came before them, else they wait for it."""
    yield from source.expect("{")
    name, held, started = "", "{}", False
    while True:
        yield from source.space()
        key = yield from json_values.text(source)
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        if key == "name":
            name = yield from _name(source, known)
        elif key in ARGUMENTS and name and not started and (yield from source.ahead(1)) == "{":
            started = True
            source.start(name)
            yield from json_values.value(source, source.arguments)
            source.hold()
        else:
            found: list[str] = []
            yield from json_values.value(source, found.append)
            if key in ARGUMENTS:
                held = _object("".join(found))
        yield from source.space()
        if not (yield from source.accept(",")):
            break
    yield from source.expect("}")
    if not started:
        if not name:
            raise Malformed
        source.start(name)
        source.arguments(held)
        source.hold()


def _name(source: TextSource, known: bool) -> Steps[str]:
    name = yield from json_values.text(source)
    if not 0 < len(name) <= MAX_NAME or (known and name not in (source.reading.schemas or {})):
        raise Malformed
    return name


def _object(found: str) -> str:
    """Arguments that came before the name, or as a string that holds JSON."""
    value = json.loads(found)
    if isinstance(value, str):
        try:
            found, value = value, json.loads(value)
        except (ValueError, RecursionError):
            raise Malformed from None
    if not isinstance(value, dict):
        raise Malformed
    return found


def arguments(source: TextSource, name: str) -> Steps[None]:
    """Arguments by themselves, of a call that was named before."""
    yield from source.space()
    if not 0 < len(name) <= MAX_NAME or (yield from source.ahead(1)) != "{":
        raise Malformed
    source.start(name)
    yield from json_values.value(source, source.arguments)
    source.hold()
