"""Calls whose arguments are written one by one between tags: qwen3-coder's and GLM's."""

from __future__ import annotations

import json
from typing import Any

from quire.text.messages.json_values import refuse
from quire.text.messages.text_source import MAX_NAME, Malformed, Steps, TextSource

_PYTHON = {"True": "true", "False": "false", "None": "null"}


class Members:
    """The members of a call's arguments, written as JSON while they come."""

    def __init__(self, source: TextSource, name: str) -> None:
        if not 0 < len(name) <= MAX_NAME:
            raise Malformed
        self._source = source
        self._properties = _properties((source.reading.schemas or {}).get(name))
        self._begun = False
        source.start(name)

    def member(self, key: str, closers: tuple[str, ...]) -> Steps[None]:
        """One member up to one of `closers`: strings stream, other values are passed on when they are whole."""
        source = self._source
        types = types_of(self._properties.get(key))
        if types == {"string"}:
            source.release()
            self._key(key)
            source.arguments('"')
            if not (yield from source.until(closers, self._characters, half=False)):
                raise Malformed
            source.arguments('"')
        else:
            text, _ = yield from source.until_one(closers)
            source.release()
            self._key(key)
            source.arguments(_value(text, types))

    def end(self) -> None:
        """No more members."""
        self._source.arguments("}" if self._begun else "{}")

    def _key(self, key: str) -> None:
        self._source.arguments(f"{', ' if self._begun else '{'}{_json(key)}: ")
        self._begun = True

    def _characters(self, text: str) -> None:
        self._source.arguments(_json(text)[1:-1])


def qwen3_coder(source: TextSource, opener: str) -> Steps[None]:
    """<function=NAME><parameter=KEY>VALUE</parameter></function>, a line each, within <tool_call>."""
    if opener != "<function=":
        yield from source.space()
        yield from source.expect("<function=")
    name, _ = yield from source.until_one((">",), MAX_NAME)
    members = Members(source, name.strip())
    while True:
        source.hold()
        yield from source.space()
        if (yield from source.accept("</function>", "</tool_call>")):
            break
        yield from source.expect("<parameter=")
        key, _ = yield from source.until_one((">",), MAX_NAME)
        yield from source.accept("\n")
        yield from members.member(key.strip(), ("\n</parameter>", "</parameter>"))
    members.end()


def glm4(source: TextSource, _: str) -> Steps[None]:
    """NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each argument, within <tool_call>."""
    name, follows = yield from source.until_one(("<arg_key>", "</tool_call>"), MAX_NAME)
    if not name.strip() or "\n" in name.strip():
        raise Malformed
    members = Members(source, name.strip())
    while follows != "</tool_call>":
        source.hold(follows)
        key, _ = yield from source.until_one(("</arg_key>",), MAX_NAME)
        yield from source.space()
        yield from source.expect("<arg_value>")
        yield from members.member(key.strip(), ("</arg_value>",))
        source.hold()
        yield from source.space()
        follows = "<arg_key>" if (yield from source.accept("<arg_key>")) else "</tool_call>"
        if follows == "</tool_call>":
            yield from source.expect("</tool_call>")
    members.end()


def _properties(schema: Any) -> dict[str, Any]:
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def types_of(schema: Any) -> set[str]:
    """The types that a value may have; none where its schema does not say."""
    found = schema.get("type") if isinstance(schema, dict) else None
    return {found} if isinstance(found, str) else {t for t in found or () if isinstance(t, str)}


def _value(text: str, types: set[str]) -> str:
    """JSON of a value as a tag holds it: a string stands there bare."""
    plain = text.strip()
    if "string" in types and not ("null" in types and plain in ("null", "None")):
        return _json(text)
    plain = _PYTHON.get(plain, plain)
    try:
        json.loads(plain, parse_constant=refuse)
    except (ValueError, RecursionError):
        return _json(text)
    return plain


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
