"""Where in a schema it is that no grammar can be made of, in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.text.structured.schemas.normalize import normalized
from quire.text.structured.schemas.work import HOPS, NotOffered, Place, error_of, told

TRIES = 100
"""Parts of a schema that are tried by themselves at most."""
_PLAIN = (
    ("schema is false", "no value is allowed here (false, or not: {})"),
    ("is unsatisfiable", "no value is allowed for it, and it is required"),
    ("anyOf is empty", "no value is allowed here: nothing is left to choose of"),
    ("Regex is empty", "no text has all that is asked of it (pattern, format, lengths, values)"),
    ("Unsatisfiable", "no value has all that is asked of it"),
    ("Unable to determine if regex is empty", "its patterns are too large together; make them simpler"),
    ("does not fetch", "$ref names another document, and none is fetched; put what it names into $defs"),
    ("Failed to generate regex", "a bound is beyond what a grammar counts to"),
)
_LONGEST = 200


def plain(error: str) -> str:
    """An error of llguidance as its users would say it."""
    found = next((words for sign, words in _PLAIN if sign in error), None)
    return found or error.strip().splitlines()[0][:_LONGEST]


def blame(given: Any, error: str) -> str:
    """`error` of the grammar of a schema, with the place of the smallest part of it that has one by itself."""
    try:
        made = normalized(given).schema
    except NotOffered as refused:
        return str(refused)
    place: Place = ()
    part, shared, left = made, made.get("$defs", {}) if isinstance(made, dict) else {}, TRIES
    if not error_of(made):
        return plain(error)
    going = True
    while going:
        going = False
        for name, inner in _parts(part, shared):
            left -= 1
            if left < 0:
                break
            alone = {**inner, "$defs": shared} if isinstance(inner, dict) and shared else inner
            if inner is not False and (found := error_of(alone)):
                place, part, error, going = (*place, *name), inner, found, True
                break
    missing = _missing(part, shared)
    return f"{told((*place, *missing))}{plain(error)}"


def _missing(part: Any, shared: Any) -> Place:
    """The member that an object requires and nothing can be."""
    for _ in range(HOPS):
        if not isinstance(part, dict) or not isinstance(part.get("$ref"), str):
            break
        part = shared.get(part["$ref"].removeprefix("#/$defs/"))
    known = part.get("properties") if isinstance(part, dict) else None
    required = part.get("required") if isinstance(part, dict) else None
    if not isinstance(known, dict) or not isinstance(required, list):
        return ()
    return next(((name,) for name in required if isinstance(name, str) and known.get(name) is False), ())


def _parts(schema: Any, shared: Any) -> Iterator[tuple[Place, Any]]:
    """Schemas in a schema, and the names of the properties that they are of."""
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("properties"), dict):
        yield from (((name,), each) for name, each in schema["properties"].items())
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield ("[]" if name == "items" else "*",), schema[name]
    for name in ("prefixItems", "items", "anyOf", "allOf"):
        if isinstance(schema.get(name), list):
            yield from ((() if name.endswith("Of") else ("[]",), each) for each in schema[name])
    ref = schema.get("$ref")
    if isinstance(ref, str) and isinstance(shared, dict) and ref.startswith("#/$defs/"):
        found = shared.get(ref.removeprefix("#/$defs/"))
        if len(schema) > 1 or found is not None:
            yield (), found
