"""How types, defaults and tables are written on the pages that are made from the code."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from quire.core.options.ranges import Range

PLAIN = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    type(None): "null",
    Any: "any",
    dict: "object",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; cells may hold anything but line ends."""
    lines = [head, ["---"] * len(head), *([cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Text as a cell of a table."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def escaped(text: str) -> str:
    """Plain text as Markdown that shows it: words in capitals between < and > are no tags."""
    return re.sub(r"<(?=[A-Za-z/|])", "&lt;", text)


def kind(found: Any) -> str:
    """A type in words."""
    origin = get_origin(found)
    if origin is Annotated:
        return kind(get_args(found)[0])
    if origin in (Union, types.UnionType):
        return " or ".join(kind(part) for part in get_args(found) if part is not type(None))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(found))
    if origin in (list, tuple):
        inner = [part for part in get_args(found) if part is not ...]
        return f"list of ({kind(inner[0])})" if " or " in kind(inner[0]) else f"list of {kind(inner[0])}"
    if origin is dict:
        return "object"
    if isinstance(found, type) and issubclass(found, msgspec.Struct):
        return "object"
    return PLAIN.get(found, getattr(found, "__name__", str(found)))


def ranged(limits: Range | None) -> str:
    """A sentence that says the range of a field; nothing where it has none."""
    return "" if limits is None else f"It {limits.words}."


def written(value: object) -> str:
    """A default; nothing where there is none."""
    if value is None or value == () or value == "":
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"
