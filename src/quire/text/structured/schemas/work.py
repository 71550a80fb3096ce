"""What a schema's normalization shares: the document, what is left of its bounds, references, what is not held."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher

MAX_NODES = 10_000
"""Schemas, values of enums and ways that are made of them, in one document."""
MAX_DEPTH = 100
"""Schemas within schemas."""
MARK = "x-quire-place"
"""Of a schema in a Lark grammar: what errors about it begin with, as the name of a tool."""
SHOWN, LONGEST = 12, 120
"""Names, and characters, of a place that a message tells."""
HOPS = 32
"""References behind each other that are followed to see what a schema is."""
CONTENTS = ("const", "default", "enum", "example", "examples")
"""Keywords that have values and no schemas."""

Place = tuple[str, ...]


class NotOffered(ValueError):
    """What is asked for cannot be had; the message says why."""


def told(at: Place) -> str:
    """What a message about a place begins with."""
    names = [*at[:SHOWN], "..."] if len(at) > SHOWN else at
    return f"property '{'.'.join(names)[:LONGEST]}': " if at else ""


class SchemaWork:
    """Work on one document. `loose`: what the grammar does not hold, each with its place.

    `tags`: by the number of a schema it and its tags, as `values` finds them.
    `foreign`: references go by `$id`, `$anchor` or a dynamic scope; then they and what they name stay as they are.
    """

    def __init__(self, root: Any, each: Callable[[SchemaWork, Any, Place], Any]) -> None:
        self.root = root
        self.loose: list[str] = []
        self.foreign = _foreign(root)
        self._each = each
        self._left, self._depth = MAX_NODES, 0
        self._names: dict[tuple[str, str], str] = {}
        self._taken: set[str] = set()
        self._waiting: deque[tuple[str, Any, Place]] = deque()
        self._compiled: dict[str, bool] = {}
        self.tags: dict[int, tuple[Any, dict[str, set[str]]]] = {}

    def schema(self, given: Any, at: Place) -> Any:
        """One that a grammar holds, as near to `given` as can be, and never narrower than what is said of it."""
        self.count(at)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotOffered(f"{told(at)}the schema is nested more than {MAX_DEPTH} deep")
        try:
            return self._each(self, given, at)
        finally:
            self._depth -= 1

    def count(self, at: Place, more: int = 1) -> None:
        """Work is to be done for `more` schemas or values."""
        self._left -= more
        if self._left < 0:
            raise NotOffered(f"{told(at)}the schema has more than {MAX_NODES} parts; make it simpler")

    def lose(self, at: Place, reason: str) -> None:
        """The grammar does not hold this."""
        self.loose.append(f"{told(at)}{reason}")

    def resolved(self, given: Any) -> Any:
        """What `given` refers to, if it is a reference alone; else itself."""
        for _ in range(HOPS):
            if not isinstance(given, dict) or not isinstance(given.get("$ref"), str) or self.foreign:
                return given
            if given.keys() & _MEANT:
                return given
            given = self.target(given["$ref"], ())
        return given

    def refer(self, ref: str, at: Place) -> str:
        """The reference to take in place of `ref`."""
        if self.foreign or ref == "#":
            return ref
        return self.named(ref, self.target(ref, at), at)

    def named(self, ref: str, target: Any, at: Place, variant: str = "") -> str:
        """A reference to `target`, which is what `ref` names, or a `variant` of that."""
        name = self._names.get((ref, variant))
        if name is None:
            stem = ref.rpartition("/")[2] + ("." + variant if variant else "")
            name = stem = re.sub(r"[^A-Za-z0-9_.-]", "_", stem)
            if name in self._taken:
                name = f"{stem}.{len(self._taken)}"
            self._taken.add(name)
            self._names[ref, variant] = name
            self._waiting.append((name, target, at))
        return f"#/$defs/{name}"

    def definitions(self) -> dict[str, Any]:
        """All that was referred to."""
        made = {}
        while self._waiting:
            name, target, at = self._waiting.popleft()
            made[name] = self.schema(target, at)
        return made

    def compiles(self, schema: Any) -> bool:
        """Whether a grammar can be made of a small schema that stands alone."""
        text = json.dumps(schema)
        if text not in self._compiled:
            self.count((), 5)
            self._compiled[text] = not error_of(schema)
        return self._compiled[text]

    def target(self, ref: str, at: Place) -> Any:
        """What a reference points at."""
        found = self.root
        for token in unquote(ref).split("/")[1:]:
            token = token.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and token in found:
                found = found[token]
            elif isinstance(found, list) and token.isdecimal() and int(token) < len(found):
                found = found[int(token)]
            else:
                raise NotOffered(f"{told(at)}$ref {ref[:200]!r} points at nothing")
        return found


_MEANT = frozenset({
    "type", "enum", "const", "properties", "required", "items", "prefixItems", "allOf", "anyOf", "oneOf", "not", "if",
    "pattern", "format", "minimum", "maximum", "additionalProperties", "patternProperties", "minLength", "maxLength",
})  # fmt: skip


def error_of(schema: Any) -> str:
    """Why no grammar can be made of a schema; "" when one can."""
    try:
        return str(LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema))))
    except ValueError as error:
        return str(error)


def _foreign(root: Any) -> bool:
    left: list[tuple[Any, bool]] = [(root, True)]
    while left:
        found, outer = left.pop()
        if isinstance(found, list):
            left += [(each, False) for each in found]
        elif isinstance(found, dict):
            ref = found.get("$ref")
            if isinstance(ref, str) and ref != "#" and not ref.startswith("#/"):
                return True
            names = ("$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", *(() if outer else ("$id", "id")))
            if any(isinstance(found.get(name), str) for name in names):
                return True
            left += [(value, False) for name, value in found.items() if name not in CONTENTS]
    return False


def strings(value: Any) -> Sequence[str] | None:
    """`value` if it is a list of texts."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return value
    return None
