"""Texts, numbers and lists of a schema, as a grammar holds them."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

from quire.text.structured.schemas.patterns import DATE, without_lookahead
from quire.text.structured.schemas.schema_values import canonical, finite
from quire.text.structured.schemas.work import NotOffered, Place, SchemaWork, told

Made = dict[str, Any]
HELD = frozenset({"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that are grammars; by JSON Schema all others are remarks."""
_DAYS = {"date": f"^{DATE}$", "date-time": f"^{DATE}"}
LARGE = 1e15
"""Bounds of numbers beyond this are tried before they are asked for."""
ENDLESS = 1.7e308
"""Bounds that all numbers of 64 bits are within, or as good as all."""
MAX_WAYS = 400
"""Lists without repeats that are written out one by one."""


def texts(work: SchemaWork, made: Made, at: Place) -> None:
    """`format` and `pattern`."""
    if made.get("format") not in HELD:
        made.pop("format", None)
    found = [_DAYS[made["format"]]] if made.get("format") in _DAYS and _text_alone(made) else []
    pattern = made.get("pattern")
    if isinstance(pattern, str):
        read = readable(work, pattern, at)
        if read is None:
            work.lose(at, f"pattern {pattern[:200]!r} looks around or back, which no grammar does")
        found += read or []
    if found or isinstance(pattern, str):
        made.pop("pattern", None)
        if found:
            made["pattern"] = found[0]
        for more in found[1:]:
            also(made, {"pattern": more})


def readable(work: SchemaWork, pattern: str, at: Place) -> list[str] | None:
    """Patterns that a grammar reads and that together are `pattern`; None: it reads none such."""
    found = without_lookahead(pattern)
    if found is not None and all(work.compiles({"type": "string", "pattern": each}) for each in found):
        return found
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise NotOffered(f"{told(at)}pattern {pattern[:200]!r} is no regular expression: {error}") from None
    return None


def also(made: Made, more: Made) -> None:
    """Have `made` be `more` as well."""
    given = made.get("allOf")
    made["allOf"] = [*(given if isinstance(given, list) else ()), more]


def _text_alone(made: Made) -> bool:
    return made.get("type") in ("string", ["string", "null"], ["null", "string"], ["string"])


def numbers(work: SchemaWork, made: Made, at: Place) -> None:
    """Bounds as draft 4 has them, and such as no grammar can be made of."""
    for name, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(made.get(name), bool) and made.pop(name) and bound in made:
            made[name] = made.pop(bound)
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    given = {name: made[name] for name in names if _number(made.get(name))}
    if not given or (all(abs(value) < LARGE for value in given.values()) and "multipleOf" not in given):
        return
    kind = {"type": made["type"]} if made.get("type") in ("integer", "number") else {}
    for name in [name for name, value in given.items() if abs(value) >= ENDLESS and name != "multipleOf"]:
        del given[name], made[name]
    if made.get("type") == "integer" and given.get("minimum") == -(2**63):
        made["minimum"] = given["minimum"] = 1 - 2**63  # one less has no regular expression in llguidance
    for name in sorted(given, key=lambda name: -abs(given[name])):
        if work.compiles({**kind, **given}):
            break
        work.lose(at, f"{name} {given[name]!r} is beyond what a grammar counts to")
        del given[name], made[name]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def lists(work: SchemaWork, made: Made, given: Made, at: Place) -> None:
    """Lists, of which `given` says what `made` is to say; items come first."""
    inner = (*at, "[]")
    for name in ("prefixItems", "items"):
        if isinstance(made.get(name), list):
            made[name] = [work.schema(each, inner) for each in made[name]]
    listed = isinstance(made.get("items"), list)
    if "additionalItems" in made:
        rest = made.pop("additionalItems")
        if listed:
            made["additionalItems"] = work.schema(rest, inner)
    if "items" in made and not listed:
        made["items"] = work.schema(made["items"], inner)
    _contains(work, made, at)
    if made.pop("uniqueItems", False) is True:
        _without_repeats(work, made, given.get("items"), at)
    if "unevaluatedItems" in made:
        rest = made.pop("unevaluatedItems")
        if made.keys() & {"allOf", "anyOf", "oneOf", "if", "$ref", "contains"}:
            if rest not in (True, {}):
                work.lose(at, "unevaluatedItems depends on what else is said")
        elif "items" not in made:
            made["items"] = work.schema(rest, inner)


def _contains(work: SchemaWork, made: Made, at: Place) -> None:
    least, most = made.pop("minContains", 1), made.pop("maxContains", None)
    if "contains" not in made:
        return
    wanted = work.schema(made.pop("contains"), (*at, "[]"))
    least = least if isinstance(least, int) else 1
    if least:
        made["minItems"] = max(least, made.get("minItems", 0))
    every = wanted in ({}, True) or ("prefixItems" not in made and canonical(wanted) == canonical(made.get("items")))
    if every and isinstance(most, int):
        made["maxItems"] = min(most, made.get("maxItems", most))
    elif not every and (least or most is not None):
        work.lose(at, "contains asks for some of the items, wherever they stand")


def _without_repeats(work: SchemaWork, made: Made, items: Any, at: Place) -> None:
    """`uniqueItems`: few values are written out, else the grammar allows repeats."""
    least, most = made.get("minItems", 0), made.get("maxItems")
    if isinstance(most, int) and most <= 1:
        return
    plain = not made.keys() & {"prefixItems", "enum", "const"}
    values = finite(work, items) if plain else None
    if values is None or not isinstance(least, int) or least > len(values):
        work.lose(at, "uniqueItems of values that are not listed")
        return
    most = min(most, len(values)) if isinstance(most, int) else len(values)
    made["maxItems"] = most
    if sum(math.perm(len(values), size) for size in range(least, most + 1)) > MAX_WAYS:
        work.lose(at, f"uniqueItems of {len(values)} values, too many to write out their orders")
        return
    ways: list[Made] = [
        {"prefixItems": [{"const": value} for value in way], "items": False, "minItems": size}
        for size in range(least, most + 1)
        for way in itertools.permutations(values, size)
    ]
    work.count(at, sum(1 + int(way["minItems"]) for way in ways))
    for name in ("items", "minItems", "maxItems"):
        made.pop(name, None)
    if work.compiles({"type": "array", "anyOf": ways}):
        also(made, {"type": "array", "anyOf": ways} if made.get("type") == "array" else {"anyOf": ways})
