"""What values a schema can have, where that is plain to see: types, finite sets, tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.text.structured.schemas.work import SchemaWork

ALL = ("null", "boolean", "integer", "number", "string", "array", "object")
MOST_DEPTH = 8
"""Unions within unions that are looked into for tags."""
_BOTH = {"number": {"number", "integer"}}


def canonical(value: Any) -> str:
    """A name that two values share when JSON Schema calls them equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(canonical, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{canonical(value[name])}" for name in sorted(value)) + "}"
    return json.dumps(value)


def type_of(value: Any) -> str:
    """The type that JSON Schema gives a value."""
    if value is None:
        return "null"
    kinds: tuple[tuple[type, str], ...] = (
        (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"),
    )  # fmt: skip
    found = next((name for kind, name in kinds if isinstance(value, kind)), "object")
    return "integer" if isinstance(value, float) and value.is_integer() else found


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """Types that a schema allows by `type`, `const` and `enum`; "number" has "integer" beside it."""
    given = schema.get("type", list(ALL))
    names = {given} if isinstance(given, str) else {n for n in given if isinstance(n, str)} if given else set(ALL)
    found = set().union(*(_BOTH.get(name, {name}) for name in names))
    listed = listed_of(schema)
    return found if listed is None else found & {type_of(value) for value in listed}


def listed_of(schema: Any) -> list[Any] | None:
    """The values that `const` or `enum` list; None: neither does."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return found if isinstance(found, list) else None


def finite(work: SchemaWork, schema: Any) -> list[Any] | None:
    """All values of a schema that has few and says no more of them; None where that is not plain."""
    schema = work.resolved(schema)
    if not isinstance(schema, dict):
        return None
    listed = listed_of(schema)
    types = schema.get("type")
    if listed is None and types in ("boolean", "null"):
        return [None] if types == "null" else [False, True]
    if listed is None:
        ways = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(ways, list) and not schema.keys() & {"type", "properties", "allOf", "not", "items", "$ref"}:
            return _all([finite(work, way) for way in ways])
        return None
    allowed = types_of(schema)
    return list({canonical(value): value for value in listed if type_of(value) in allowed}.values())


def _all(parts: list[list[Any] | None]) -> list[Any] | None:
    found = dict[str, Any]()
    for part in parts:
        if part is None:
            return None
        found |= {canonical(value): value for value in part}
    return list(found.values())


def tags_of(work: SchemaWork, schema: Any, depth: int = 0) -> dict[str, set[str]]:
    """Properties of objects that a schema allows alone, and the finite sets of values that each can have."""
    schema = work.resolved(schema)
    known = work.tags.get(id(schema))
    if known is None:
        work.tags[id(schema)] = schema, {}  # what a schema that is a way of itself finds
        known = work.tags[id(schema)] = schema, _tags(work, schema, depth)
    return known[1]


def _tags(work: SchemaWork, schema: Any, depth: int) -> dict[str, set[str]]:
    if not isinstance(schema, dict) or depth > MOST_DEPTH:
        return {}
    properties = schema.get("properties")
    if isinstance(properties, dict):
        if types_of(schema) != {"object"} and "type" in schema:
            return {}
        found = {name: listed for name, each in properties.items() if (listed := listed_of(work.resolved(each)))}
        return {name: {canonical(value) for value in listed} for name, listed in found.items()}
    ways = schema.get("oneOf") or schema.get("anyOf")
    if not isinstance(ways, list) or not ways or len(ways) > 100:
        return {}
    each = [tags_of(work, way, depth + 1) for way in ways]
    shared = set(each[0]).intersection(*each[1:])
    return {name: set().union(*(way[name] for way in each)) for name in shared}


def apart(work: SchemaWork, one: Any, other: Any) -> bool:
    """Whether no value is of both schemas, as far as that is plain to see."""
    one, other = work.resolved(one), work.resolved(other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    kinds = types_of(one) & types_of(other)
    if not kinds:
        return True
    listed = listed_of(one), listed_of(other)
    if listed[0] is not None and listed[1] is not None:
        return not {canonical(v) for v in listed[0]} & {canonical(v) for v in listed[1]}
    if kinds != {"object"}:
        return False
    needed = [set(each["required"]) if isinstance(each.get("required"), list) else set() for each in (one, other)]
    tags = tags_of(work, one), tags_of(work, other)
    if any(not tags[0][name] & tags[1][name] for name in needed[0] & needed[1] & tags[0].keys() & tags[1].keys()):
        return True
    return any(_closed(b) and needed[i] - b.get("properties", {}).keys() for i, b in ((0, other), (1, one)))


def _closed(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties") is False and "patternProperties" not in schema
