"""Objects of a schema, as a grammar holds them."""

from __future__ import annotations

import re
from typing import Any

from quire.text.structured.schemas.leaves import Made, also, readable
from quire.text.structured.schemas.patterns import NAMES, beside
from quire.text.structured.schemas.schema_values import finite
from quire.text.structured.schemas.work import Place, SchemaWork, strings

MAX_DEPENDENCIES = 6
"""Each makes twice as many ways."""
_AROUND = frozenset({"allOf", "anyOf", "oneOf", "if", "$ref", "dependentSchemas", "not"})


def objects(work: SchemaWork, made: Made, given: Made, at: Place) -> None:
    """Objects, of which `given` says what `made` is to say; members come first."""
    rest = (*at, "*")
    if isinstance(made.get("properties"), dict):
        made["properties"] = {name: work.schema(each, (*at, name)) for name, each in made["properties"].items()}
    if "additionalProperties" in made:
        made["additionalProperties"] = work.schema(made["additionalProperties"], rest)
    if isinstance(made.get("patternProperties"), dict):
        _patterns(work, made, at)
    if "unevaluatedProperties" in made:
        _unevaluated(work, made, given, at)
    if "propertyNames" in made:
        _names(work, made, made.pop("propertyNames"), at)
    _dependencies(work, made, at)
    _counts(work, made, at)
    _without_twins(made)


def _patterns(work: SchemaWork, made: Made, at: Place) -> None:
    """Patterns of names that a grammar reads; one that it does not may be any name."""
    found: dict[str, Any] = {}
    for pattern, each in made.pop("patternProperties").items():
        inner, read = work.schema(each, (*at, "*")), readable(work, pattern, at)
        if read is not None and len(read) == 1:
            found[read[0]] = inner
            continue
        work.lose(at, f"patternProperties {pattern[:200]!r} looks around or back, which no grammar does")
        others = made.get("additionalProperties", True)
        if others not in (True, {}):
            made["additionalProperties"] = inner if others is False else {"anyOf": [inner, others]}
    if len(found) > 1 and not work.compiles({"type": "object", "patternProperties": dict.fromkeys(found, True)}):
        work.lose(at, "patternProperties whose patterns share names")
        found = {"|".join(f"(?:{pattern})" for pattern in found): {"anyOf": list(found.values())}}
    if found:
        made["patternProperties"] = found


def _unevaluated(work: SchemaWork, made: Made, given: Made, at: Place) -> None:
    rest = made.pop("unevaluatedProperties")
    if rest in (True, {}):
        return
    if not made.keys() & _AROUND:
        if "additionalProperties" not in made:
            made["additionalProperties"] = work.schema(rest, (*at, "*"))
    elif rest is False and (names := _all_names(work, given, 0)) is not None:
        work.count(at, len(names))
        also(made, {"properties": dict.fromkeys(names, True), "additionalProperties": False})
    else:
        work.lose(at, "unevaluatedProperties depends on what else is said")


def _all_names(work: SchemaWork, schema: Any, depth: int) -> list[str] | None:
    """The names of an object that is put together of parts by `allOf`; None where that is not plain."""
    work.count(())
    if not isinstance(schema, dict) or depth > 8 or work.foreign or schema.keys() & (_AROUND - {"allOf", "$ref"}):
        return None
    if schema.keys() & {"patternProperties", "additionalProperties"}:
        return None
    found = list(schema.get("properties", {}))
    parts = list(schema.get("allOf", ()))
    if isinstance(schema.get("$ref"), str):
        parts.append(work.target(schema["$ref"], ()))
    for part in parts:
        if (more := _all_names(work, part, depth + 1)) is None:
            return None
        found += more
    return found


def _names(work: SchemaWork, made: Made, names: Any, at: Place) -> None:
    """`propertyNames`: of a list they are properties, of a pattern patternProperties."""
    names = work.resolved(names)
    if not isinstance(names, dict):
        if names is False:
            made |= {"maxProperties": 0} if not made.get("properties") else {}
            made |= {"properties": {}, "additionalProperties": False}
            made.pop("patternProperties", None)
        return
    if not names.keys() & _ABOUT_NAMES and names.get("format") not in NAMES:
        return
    known, others = made.get("properties") or {}, made.get("additionalProperties", True)
    listed = finite(work, names)
    if listed is not None and "patternProperties" not in made:
        work.count(at, len(listed))
        wanted = [name for name in listed if isinstance(name, str)]
        made["properties"] = {name: known.get(name, others) for name in [*known, *wanted] if name in set(wanted)}
        made["additionalProperties"] = False
        return
    pattern = _pattern_of(work, names, at)
    if pattern is None or "patternProperties" in made or any(not re.search(pattern, name) for name in known):
        work.lose(at, "propertyNames")
    elif others is not False:
        made["patternProperties"], made["additionalProperties"] = {pattern: others}, False


_ABOUT_NAMES = frozenset({
    "enum", "const", "pattern", "minLength", "maxLength", "not", "anyOf", "oneOf", "allOf", "$ref", "if",
})  # fmt: skip


def _pattern_of(work: SchemaWork, names: Made, at: Place) -> str | None:
    """The one pattern that names of a schema have; None where it takes more to say."""
    said = names.keys() & {*_ABOUT_NAMES, "format"}
    if said == {"format"}:
        return f"^{NAMES[names['format']]}$"
    if said in ({"pattern"}, {"pattern", "format"}) and isinstance(names["pattern"], str):
        read = readable(work, names["pattern"], at)
        return read[0] if read is not None and len(read) == 1 else None
    if said <= {"minLength", "maxLength"}:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        if isinstance(least, int) and (most == "" or isinstance(most, int)):
            return f"^(?s:.){{{least},{most}}}$"
    return None


def _dependencies(work: SchemaWork, made: Made, at: Place) -> None:
    """`dependentRequired`, `dependentSchemas` and draft 7's `dependencies`: with the name, or without it."""
    found: list[tuple[str, Any]] = []
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        given = made.pop(keyword, None)
        found += given.items() if isinstance(given, dict) else ()
    required = list(strings(made.get("required")) or ())
    doubled = 0
    for name, needs in found:
        names = strings(needs)
        if names is not None and (name in required or set(names) <= set(required)):
            required += [each for each in names if each not in required] if name in required else []
            continue
        then = {"required": [name, *names]} if names is not None else work.schema(needs, at)
        if then in (True, {}):
            continue
        if doubled == MAX_DEPENDENCIES:
            work.lose(at, "more names that others depend on than a grammar can tell apart")
            return
        doubled += 1
        if names is None and isinstance(then, dict):
            then = {**then, "required": [name, *(strings(then.get("required")) or ())]}
        also(made, {"anyOf": [{"properties": {name: False}}, then]})
    if required:
        made["required"] = required


def _counts(work: SchemaWork, made: Made, at: Place) -> None:
    """`minProperties` and `maxProperties`, where a grammar counts: of names that are all required or all others."""
    known: Made = made.get("properties") or {}
    required = set(strings(made.get("required")) or ())
    least, most = made.get("minProperties"), made.get("maxProperties")
    if isinstance(least, int) and least <= len(required):
        del made["minProperties"]
    closed = made.get("additionalProperties") is False and "patternProperties" not in made
    if isinstance(most, int) and closed and most >= len(known.keys() | required):
        del made["maxProperties"]
    left = [name for name in ("minProperties", "maxProperties") if name in made]
    alone: Made = {"type": "object", **{name: made[name] for name in left}, "required": sorted(required)}
    alone |= {"properties": dict.fromkeys(known, True), "additionalProperties": closed is False}
    if not left or work.compiles(alone):
        return
    for name in left:
        work.lose(at, f"{name} of names that may be left out")
        del made[name]


def _without_twins(made: Made) -> None:
    """Other names are such as a pattern takes: without one a grammar lets a known name come again in escapes."""
    known = {*(made.get("properties") or ()), *(strings(made.get("required")) or ())}
    others = made.get("additionalProperties", True)
    if not known or "patternProperties" in made or made.keys() & {"minProperties", "maxProperties"}:
        return
    if others in (True, {}):
        made["patternProperties"], made["additionalProperties"] = {"": {}}, False
    elif others is not False and (pattern := beside(sorted(known))) is not None and not made.keys() & _AROUND:
        made["patternProperties"], made["additionalProperties"] = {pattern: others}, False
