"""One JSON schema -> the nearest that a grammar holds, and what that leaves open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.text.structured.schemas.leaves import Made, lists, numbers, texts
from quire.text.structured.schemas.objects import objects
from quire.text.structured.schemas.unions import unions
from quire.text.structured.schemas.work import NotOffered, Place, SchemaWork, told

KEPT = frozenset({
    "type", "enum", "const", "properties", "required", "items", "prefixItems", "additionalItems", "allOf", "anyOf",
    "oneOf", "not", "if", "then", "else", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "additionalProperties", "patternProperties",
    "propertyNames", "minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains", "minProperties",
    "maxProperties", "$ref", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems",
    "unevaluatedProperties", "discriminator",
})  # fmt: skip
"""Keywords that say something of values; all others are remarks."""
_FOREIGN = ("$id", "id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$defs",
            "definitions")  # fmt: skip
_DRAFTS = ("draft-04/", "draft-06/", "draft-07/", "draft/2019-09/", "draft/2020-12/")
NOTHING = "no value is allowed here (false, or not: {})"
MAX_LISTED = 4096
"""Values of one enum."""


@dataclass(frozen=True, slots=True)
class Normalized:
    """A schema for a grammar. `loose`: what it does not hold of the one that was given, each with its place."""

    schema: Any
    loose: tuple[str, ...]


def normalized(given: Any) -> Normalized:
    """`given` as a grammar holds it. `NotOffered` where it is no schema, or too large a one."""
    work = SchemaWork(given, _each)
    made = work.schema(given, ())
    if made is False:
        raise NotOffered(NOTHING)
    if made is True:
        return Normalized({}, ())
    if isinstance(made, dict):
        if definitions := work.definitions():
            made["$defs"] = definitions
        if isinstance(given.get("$schema"), str) and any(draft in given["$schema"] for draft in _DRAFTS):
            made["$schema"] = given["$schema"]
        if "x-guidance" in given:
            made["x-guidance"] = given["x-guidance"]
    return Normalized(made, tuple(dict.fromkeys(work.loose)))


def _each(work: SchemaWork, given: Any, at: Place) -> Any:
    if isinstance(given, bool):
        return given
    if not isinstance(given, dict):
        raise NotOffered(f"{told(at)}a schema must be an object, true or false")
    made: Made = {name: value for name, value in given.items() if name in KEPT}
    if work.foreign:
        _as_named(work, made, given, at)
    if isinstance(made.get("$ref"), str):
        made["$ref"] = work.refer(made["$ref"], at)
    if isinstance(made.get("enum"), list):
        work.count(at, len(made["enum"]))
        if len(made["enum"]) > MAX_LISTED:
            raise NotOffered(f"{told(at)}enum has more than {MAX_LISTED} values")
    if not unions(work, made, at):
        return False
    texts(work, made, at)
    numbers(work, made, at)
    lists(work, made, given, at)
    objects(work, made, given, at)
    return made


def _as_named(work: SchemaWork, made: Made, given: Made, at: Place) -> None:
    """Names and what is defined under them, as references go by those."""
    made |= {name: given[name] for name in _FOREIGN if name in given}
    for name in ("$defs", "definitions"):
        if isinstance(made.get(name), dict):
            made[name] = {key: work.schema(each, at) for key, each in made[name].items()}
