"""Random JSON schemas: of every keyword that grammars are made of, nested, with references that recur."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
NAMES = ("a", "id", "name", "größe", "value", "list of things", 'quo"te', "x" * 30)
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri")
PATTERNS = ("^[a-z]+$", "^(ab)*c$", "^[A-Z]{3}-\\d{4}$", "^x{20}y$|^z$", "[0-9]+", "^\\w+@\\w+\\.org$")


def random_schema(seed: int, depth: int = 3) -> Schema:
    """One schema; a seed always gives the same."""
    draw = random.Random(seed)
    schema = _any(draw, depth)
    if draw.random() < 0.15:
        schema = {
            "$defs": {"node": _node(draw)},
            "type": "object",
            "properties": {"root": {"$ref": "#/$defs/node"}, "more": schema},
            "required": draw.choice((["root"], ["root", "more"])),
            "additionalProperties": False,
        }
    return schema


def _node(draw: random.Random) -> Schema:
    """A tree of itself."""
    return {
        "type": "object",
        "properties": {
            "value": _leaf(draw),
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": draw.sample(["value", "children", "next"], draw.randint(0, 3)),
        "additionalProperties": False,
    }


def _any(draw: random.Random, depth: int) -> Schema:
    if depth == 0 or draw.random() < 0.35:
        return _leaf(draw)
    return draw.choice((_object, _object, _array, _union))(draw, depth - 1)


def _union(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(draw, depth) for _ in range(draw.randint(1, 3))]}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(NAMES, draw.randint(0, 5))
    schema: Schema = {"type": "object", "properties": {name: _any(draw, depth) for name in names}}
    schema["required"] = draw.sample(names, draw.randint(0, len(names)))
    if draw.random() < 0.7:
        schema["additionalProperties"] = draw.choice((False, False, {"type": "integer"}))
    return schema


def _array(draw: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": _any(draw, depth)}
    least = draw.choice((0, 0, 1, 2, 7))
    if draw.random() < 0.5:
        schema["minItems"] = least
    if draw.random() < 0.4:
        schema["maxItems"] = least + draw.randint(0, 3)
    if draw.random() < 0.2:
        schema["prefixItems"] = [_leaf(draw) for _ in range(draw.randint(1, 2))]
    return schema


def _leaf(draw: random.Random) -> Schema:
    return draw.choice((_string, _string, _number, _number, _listed, _plain))(draw)


def _plain(draw: random.Random) -> Schema:
    return draw.choice(({"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"type": "object"}, {}))


def _listed(draw: random.Random) -> Schema:
    values = [*NAMES, 0, -1, 3.5, None, True, "ab", [1, "x"], {"k": 1}]
    if draw.random() < 0.3:
        return {"const": draw.choice(values)}
    return {"enum": draw.sample(values, draw.randint(1, 5))}


def _string(draw: random.Random) -> Schema:
    kind = draw.random()
    if kind < 0.2:
        return {"type": "string", "format": draw.choice(FORMATS)}
    if kind < 0.4:
        return {"type": "string", "pattern": draw.choice(PATTERNS)}
    schema: Schema = {"type": "string"}
    least = draw.choice((0, 0, 1, 5, 40))
    if draw.random() < 0.5:
        schema["minLength"] = least
    if draw.random() < 0.4:
        schema["maxLength"] = least + draw.randint(0, 10)
    return schema


def _number(draw: random.Random) -> Schema:
    schema: Schema = {"type": draw.choice(("integer", "integer", "number"))}
    low = draw.choice((-1000, -7, 0, 1, 12, 100, 99999))
    if draw.random() < 0.4:
        schema[draw.choice(("minimum", "exclusiveMinimum"))] = low
    if draw.random() < 0.4:
        schema[draw.choice(("maximum", "exclusiveMaximum"))] = low + draw.choice((2, 10, 1000))
    if draw.random() < 0.1:
        schema["multipleOf"] = draw.choice((2, 5, 10))
    return schema
