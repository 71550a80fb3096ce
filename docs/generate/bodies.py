"""Fields of every route's body: type, default and meaning, from the structs that requests are read into."""

from __future__ import annotations

import json

import msgspec

from quire.core.options.ranges import ranges_of
from quire.core.params import SamplingParams
from quire.server.apis.ollama.bodies import Options
from quire.server.apis.openai.protocol import QuireOptions, StreamOptions
from quire.server.apis.tgi.generate import TgiParameters
from quire.server.openapi import help_of
from quire.server.routes import TABLE
from words import cell, escaped, kind, ranged, table

NESTED = (Options, TgiParameters, StreamOptions, QuireOptions)
"""Objects within bodies whose fields have the meaning that their names have elsewhere."""
PLAIN = {name: value for name, value in msgspec.structs.asdict(SamplingParams()).items() if name != "max_tokens"}
"""Defaults of sampling, but for the number of tokens, which each API has its own for."""


def every_body() -> str:
    """A section for each kind of body, under the routes that take it."""
    routes: dict[type[msgspec.Struct], list[str]] = {}
    for route in TABLE.routes:
        for found in route.body:
            routes.setdefault(found, []).append(route.path)
    parts = [section(found, paths) for found, paths in routes.items()]
    return "\n".join([*parts, "## Objects within them\n", *(nested(found) for found in NESTED)])


def section(found: type[msgspec.Struct], paths: list[str]) -> str:
    """A body's fields."""
    head = " and ".join(f"`POST {path}`" for path in paths)
    fields = msgspec.structs.fields(found)
    rows = [(f"`{f.name}`", kind(f.type), default(f), escaped(meaning(found, f.name))) for f in fields]
    which = " (with messages)" if found.__name__ == "TokenizeChat" else ""
    return f"## {head}{which}\n\n{table(('field', 'type', 'default', 'meaning'), rows)}"


def nested(found: type[msgspec.Struct]) -> str:
    """The fields of an object within a body."""
    ranges = ranges_of(found)
    rows = [(f"`{f.name}`", kind(f.type), ranged(ranges.get(f.name))) for f in msgspec.structs.fields(found)]
    width = 3 if ranges else 2
    shown = table(("field", "type", "range")[:width], [row[:width] for row in rows])
    return f"### {found.__name__}\n\n{escaped(cell(found.__doc__ or ''))}\n\n{shown}"


def meaning(found: type[msgspec.Struct], name: str) -> str:
    """What a field means, and its range."""
    return f"{help_of(found)[name]} {ranged(ranges_of(found).get(name))}".strip()


def default(field: msgspec.structs.FieldInfo) -> str:
    """What it is where it is not given, as far as that does not depend on the model."""
    if field.required:
        return "required"
    value = PLAIN.get(field.name)
    return "" if value in (None, (), {}) else f"`{json.dumps(value)}`"
