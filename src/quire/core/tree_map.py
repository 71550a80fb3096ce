"""Values made of dataclasses, tuples and lists, rebuilt with some of their parts replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any


def rebuilt(value: Any, change: Callable[[Any], Any], seen: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """`value` with `change(part)` for its parts: dataclasses, tuples and lists are rebuilt where one differs.

    What was one part stays one. One that was changed is not looked into, nor are functions: parts of a decoder that
    hold tensors are dataclasses.
    """
    seen = {} if seen is None else seen
    if id(value) in seen:
        return seen[id(value)][1]
    found = change(value)
    if found is value and is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        made = {name: rebuilt(part, change, seen) for name, part in parts.items()}
        if any(made[name] is not part for name, part in parts.items()):
            found = replace(value, **made)
    elif found is value and isinstance(value, (tuple, list)):
        items = [rebuilt(part, change, seen) for part in value]
        if any(a is not b for a, b in zip(items, value, strict=True)):
            found = type(value)(items)
    seen[id(value)] = (value, found)
    return found


def parts_of(value: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """All parts of `value` that are a `kind`, each once."""
    found: list[Any] = []

    def look(part: Any) -> Any:
        if isinstance(part, kind):
            found.append(part)
        return part

    rebuilt(value, look)
    return found
