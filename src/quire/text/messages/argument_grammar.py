"""Lark of arguments that are written one by one: between tags, or as keywords of Python."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.core.errors import BadRequest
from quire.text.messages.grammar import LarkRules
from quire.text.messages.tagged import types_of
from quire.text.messages.text_source import MAX_NAME

_ROOT = frozenset({
    "type", "properties", "required", "additionalProperties", "title", "description", "default", "examples",
    "$schema", "$id", "$comment", "$defs", "definitions", "strict",
})  # fmt: skip
_NO_TEXT = ("pattern", "$ref", "allOf", "anyOf", "oneOf", "not", "if")
_TAG_KEY, _KEYWORD = re.compile(r"[^<>\s]+"), re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")


class Member(NamedTuple):
    """One argument: its schema, in which references hold as they did."""

    key: str
    schema: Mapping[str, Any]
    required: bool

    @property
    def place(self) -> str:
        """What messages call it."""
        return f"property {self.key[:MAX_NAME]!r}"

    def refusal(self, reason: str) -> BadRequest:
        """Explain that an argument cannot be written; the message and param begin with its place."""
        place = f"properties.{self.key[:MAX_NAME]}"
        return BadRequest(f"{place}: {reason}", param=place)


def members_of(schema: Mapping[str, Any], keys: re.Pattern[str]) -> list[Member]:
    """The members of an object, as they are listed; `BadRequest` where that is not all there is to say of it."""
    if more := sorted(schema.keys() - _ROOT):
        raise BadRequest(f"{more[0]}: calls of this model's format cannot be forced by it", param=more[0])
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list):
        name = "required" if isinstance(properties, dict) else "properties"
        raise BadRequest(f"{name}: is none of a JSON schema", param=name)
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    found = []
    for key in dict.fromkeys([*properties, *map(str, required)]):
        inner = properties.get(key, {})
        if not isinstance(inner, dict):
            inner = {} if inner is True else {"not": {}}
        refers = shared and '"$ref"' in json.dumps(inner)
        found.append(Member(key, {**shared, **inner} if refers else inner, key in required))
        if len(key) > MAX_NAME or not keys.fullmatch(key):
            raise found[-1].refusal("this name cannot be written in this model's format of calls")
    return found


@dataclass(frozen=True, slots=True)
class Tags:
    """Arguments between tags: `before`, in which "KEY" is the name, the value, `closer`. `never`: what no text has."""

    before: str
    closer: str
    after: str
    never: str

    def __call__(self, rules: LarkRules, schema: Mapping[str, Any]) -> str:
        """Members that an object requires and any of the others, in its order."""
        parts = []
        for member in members_of(schema, _TAG_KEY):
            before, after = rules.said(self.before.replace("KEY", member.key)), rules.said(self.after)
            part = f"{before} {self._value(rules, member)} {after}"
            parts.append(part if member.required else f"({part})?")
        return rules.rule(" ".join(parts)) if parts else ""

    def _value(self, rules: LarkRules, member: Member) -> str:
        """Value with what closes it. Text stands there bare, all else is JSON."""
        schema, types = member.schema, types_of(member.schema)
        if "string" not in types:
            return f"{rules.json(schema, member.place)} {rules.said(self.closer)}"
        if (odd := next((name for name in _NO_TEXT if name in schema), None)) is not None:
            raise member.refusal(f"{odd} of a text cannot be forced in this model's format of calls; leave it out")
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if not isinstance(least, int) or not isinstance(most, (int, type(None))) or least < 0:
            raise member.refusal("minLength and maxLength must be numbers of characters")
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if listed is None:
            return rules.until(rules.text((self.never,), least, most), (self.closer,))
        texts = [self._bare(value, types) for value in (listed if isinstance(listed, list) else ())]
        fit = [t for t in texts if t is not None and least <= len(t) and (most is None or len(t) <= most)]
        if not fit:
            raise member.refusal("none of its values can be written in this model's format of calls")
        words = " | ".join(rules.said(text) for text in fit if text)
        return " ".join(
            filter(None, [f"({words}){'?' if '' in fit else ''}" if words else "", rules.said(self.closer)])
        )

    def _bare(self, value: Any, types: set[str]) -> str | None:
        """A value as it stands between tags, if that is read as it."""
        if value is None:
            return "null" if "null" in types else None
        if not isinstance(value, str) or self.never in value or ("null" in types and value.strip() in ("null", "None")):
            return None
        return value


def keywords(rules: LarkRules, schema: Mapping[str, Any]) -> str:
    """Arguments as NAME=VALUE, values as JSON, of which Python's reader takes what is not its own."""
    rest, all_optional = "", True
    for member in reversed(members_of(schema, _KEYWORD)):
        part = f"{rules.said(member.key + '=')} {rules.json(member.schema, member.place)}"
        later = f'("," " "? {rest})' if rest else ""
        later += "?" if later and all_optional else ""
        if member.required:
            rest, all_optional = rules.rule(f"{part} {later}"), False
        elif rest:
            rest = rules.rule(f"{part} {later} | {rest}")
        else:
            rest = rules.rule(part)
    return f"({rest})?" if rest and all_optional else rest
