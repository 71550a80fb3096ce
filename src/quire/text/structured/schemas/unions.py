"""What a schema puts together of others: all of some, any, exactly one, one or another, and what is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.text.structured.schemas.leaves import Made, also
from quire.text.structured.schemas.patterns import beside
from quire.text.structured.schemas.schema_values import ALL, apart, canonical, finite, listed_of, tags_of
from quire.text.structured.schemas.work import Place, SchemaWork, strings

MAX_PAIRS = 60
"""Ways of a `oneOf` of which each two are compared."""


def unions(work: SchemaWork, made: Made, at: Place) -> bool:
    """`allOf`, `anyOf`, `oneOf`, `if` and `not` of `made`; False where no value is left."""
    for keyword in ("allOf", "anyOf", "oneOf"):
        if keyword in made and not isinstance(made[keyword], list):
            return True  # refused as it stands
    tag = made.pop("discriminator", None)
    tag = tag.get("propertyName") if isinstance(tag, dict) else None
    if "allOf" in made:
        made["allOf"] = [work.schema(each, at) for each in made["allOf"]]
    ways = made.pop("oneOf", None)
    if ways and "anyOf" in made:
        also(made, {"anyOf": _any(work, made.pop("anyOf"), None, at)})
    if "anyOf" in made:
        made["anyOf"] = _any(work, made["anyOf"], tag, at)
    if ways is not None:
        made["anyOf"] = _one(work, ways, tag, at)
    if any(each in (True, {}) for each in made.get("anyOf", ())):
        del made["anyOf"]
    condition, then, other = made.pop("if", None), made.pop("then", True), made.pop("else", True)
    if condition is not None and (then, other) != (True, True):
        _either(work, made, condition, (then, other), at)
    return "not" not in made or _without(work, made, made.pop("not"), at)


def _any(work: SchemaWork, ways: Sequence[Any], tag: Any, at: Place) -> list[Any]:
    if isinstance(tag, str) and _tag_of(work, ways, tag) == tag:
        return [_with_tag(work, each, tag, at) for each in ways]
    return [work.schema(each, at) for each in ways]


def _one(work: SchemaWork, ways: Sequence[Any], tag: Any, at: Place) -> list[Any]:
    """Ways of which a value has one at most: so by a tag that all have, or as any two have no value in common."""
    if len(ways) > 1 and (found := _tag_of(work, ways, tag)) is not None:
        return [_with_tag(work, each, found, at) for each in ways]
    pairs = [(a, b) for i, a in enumerate(ways) for b in ways[:i]] if len(ways) <= MAX_PAIRS else None
    work.count(at, len(pairs or ()) // 10)
    if pairs is None or not all(apart(work, a, b) for a, b in pairs):
        work.lose(at, "oneOf, of which two may fit one value")
    return [work.schema(each, at) for each in ways]


def _tag_of(work: SchemaWork, ways: Sequence[Any], wanted: Any) -> str | None:
    """A property that says which of `ways` an object is, `wanted` if that does."""
    tags = [tags_of(work, way) for way in ways]
    shared = [name for name in tags[0] if all(name in each for each in tags)] if tags else []
    for name in sorted(shared, key=lambda name: name != wanted):
        values = [value for each in tags for value in each[name]]
        if len(values) == len(set(values)):
            return name
    return None


def _with_tag(work: SchemaWork, way: Any, tag: str, at: Place) -> Any:
    """`way` with the tag required: left out, it could not say which way an object is."""
    ref = way.get("$ref") if isinstance(way, dict) else None
    target = work.resolved(way)
    if not isinstance(target, dict) or tag in (strings(target.get("required")) or ()):
        return work.schema(way, at)
    needed = {**target, "required": [*(strings(target.get("required")) or ()), tag]}
    if isinstance(ref, str) and target is not way:
        return {"$ref": work.named(ref, needed, at, variant=tag)}
    return work.schema(needed, at)


def _either(work: SchemaWork, made: Made, condition: Any, ways: tuple[Any, Any], at: Place) -> None:
    """`if`, `then` and `else`: exact where the condition is one property of few values, else both ways are open."""
    then, other = (work.schema(each, at) for each in ways)
    condition = work.resolved(condition)
    if condition in (True, {}) or condition is False:
        also(made, other if condition is False else then)
        return
    found = _told_apart(work, made, condition)
    if found is None:
        work.lose(at, "if asks for more than one property of a few values")
        also(made, {"anyOf": [then, other]})
        return
    name, yes, no, absent = found
    parts: list[tuple[Made, Any]] = [({"properties": {name: {"enum": yes}}, "required": [name]}, then),
                                     ({"properties": {name: {"enum": no}}, "required": [name]}, other),
                                     ({"properties": {name: False}}, then if absent else other)]  # fmt: skip
    kept = [part for part in parts if part[0]["properties"][name] != {"enum": []}]
    also(made, {"anyOf": [part if way in (True, {}) else {"allOf": [part, way]} for part, way in kept]})


def _told_apart(work: SchemaWork, made: Made, condition: Any) -> tuple[str, list[Any], list[Any], bool] | None:
    """The property that a condition is about, its values that fulfil it, the others, and whether its absence does."""
    if not isinstance(condition, dict) or condition.keys() - {"properties", "required", "type", "title", "$comment"}:
        return None
    properties, required = condition.get("properties"), strings(condition.get("required", []))
    if not isinstance(properties, dict) or len(properties) != 1 or required is None or made.get("type") != "object":
        return None
    [(name, wanted)] = properties.items()
    known = (made.get("properties") or {}).get(name)
    values, listed = finite(work, known), finite(work, wanted)
    if values is None or listed is None or (required and list(required) != [name]):
        return None
    chosen = {canonical(value) for value in listed}
    yes = [value for value in values if canonical(value) in chosen]
    return name, yes, [value for value in values if canonical(value) not in chosen], not required


def _without(work: SchemaWork, made: Made, no: Any, at: Place) -> bool:
    """`not`, by what it means; False where nothing is left."""
    no = work.resolved(no)
    if no is False:
        return True
    said = {name: value for name, value in no.items() if name in _SAID} if isinstance(no, dict) else {}
    if no is True or (isinstance(no, dict) and not said):
        return False
    if set(said) == {"not"}:
        also(made, work.schema(said["not"], at))
        return True
    if set(said) == {"anyOf"} and isinstance(said["anyOf"], list):
        return all(_without(work, made, each, at) for each in said["anyOf"])
    if set(said) == {"type"} and said["type"] != "integer":
        return _without_types(made, said["type"])
    if set(said) == {"required"} and made.get("type") == "object" and strings(said["required"]):
        also(made, {"anyOf": [{"properties": {name: False}} for name in said["required"]]})
        return True
    listed = listed_of(said) if said.keys() <= {"enum", "const", "type"} else None
    if listed is not None and _without_values(made, listed):
        return True
    work.lose(at, "not")
    return True


_SAID = frozenset({
    "type", "enum", "const", "properties", "required", "items", "prefixItems", "allOf", "anyOf", "oneOf", "not", "if",
    "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
    "maxLength", "additionalProperties", "patternProperties", "propertyNames", "minItems", "maxItems", "uniqueItems",
    "contains", "minProperties", "maxProperties", "$ref", "$dynamicRef", "$recursiveRef", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties", "additionalItems", "then", "else",
    "minContains", "maxContains",
})  # fmt: skip


def _without_types(made: Made, types: Any) -> bool:
    gone = {types} if isinstance(types, str) else set(types)
    gone |= {"integer"} if "number" in gone else set()
    given = made.get("type", [each for each in ALL if each != "integer"])
    left = [each for each in ([given] if isinstance(given, str) else given) if each not in gone]
    made["type"] = left
    return bool(left)


def _without_values(made: Made, values: list[Any]) -> bool:
    """Whether `made` can be what it is without `values`, and then it is so."""
    gone = {canonical(value) for value in values}
    listed = listed_of(made)
    if listed is not None:
        made.pop("const", None)
        made["enum"] = [value for value in listed if canonical(value) not in gone]
        return True
    if made.get("type") == "boolean":
        made["enum"] = [value for value in (False, True) if canonical(value) not in gone]
        return True
    if made.get("type") != "string":
        return False
    pattern = beside(sorted({value for value in values if isinstance(value, str)}))
    if pattern is not None:
        also(made, {"pattern": pattern})
    return pattern is not None
