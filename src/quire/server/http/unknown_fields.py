"""Fields of bodies that nobody knows: taken out, unless the server is `--strict`, and named in a `Warning` header."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from msgspec.inspect import Field, ListType, Metadata, StructType, Type, UnionType, type_info

MAX_NAMED = 10
MAX_NAME = 100


def drop_unknown(value: Any, kind: type) -> tuple[Any, list[str]]:
    """The JSON `value` without fields that the struct `kind` and the structs in it do not have, and their paths."""
    found: list[str] = []
    return _dropped(value, _type(kind), "", found), found


def warning(names: list[str]) -> bytes:
    """The value of a `Warning` header (RFC 7234, 5.5; code 299) that names ignored fields, printable and short."""
    shown = [name[:MAX_NAME].encode("unicode_escape").decode() for name in names[:MAX_NAMED]]
    text = ", ".join(shown) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'299 quire "ignored, without effect here: {quoted}"'.encode("ascii")


def _dropped(value: Any, kind: Type, path: str, found: list[str]) -> Any:
    """`value`, or a copy without what is unknown. What is of another type than `kind` stays, to be refused later."""
    kind = _plain(kind)
    if isinstance(kind, UnionType):
        parts = [part for part in kind.types if isinstance(part, (StructType, ListType))]
        wanted = ListType if isinstance(value, list) else StructType
        kind = next((part for part in parts if isinstance(part, wanted)), kind)
    if isinstance(kind, ListType) and isinstance(value, list) and _holds_structs(kind.item_type):
        return [_dropped(item, kind.item_type, f"{path}[{i}]", found) for i, item in enumerate(value)]
    if not isinstance(kind, StructType) or not isinstance(value, dict):
        return value
    fields = _fields(kind.cls)
    below = f"{path}." if path else ""
    found += [f"{below}{name}" for name in value if name not in fields]
    return {
        name: _dropped(item, fields[name].type, f"{below}{name}", found)
        for name, item in value.items()
        if name in fields
    }


@cache
def _type(kind: type) -> Type:
    """Looking at a kind takes 1 ms, which is more than all else that a short request needs here."""
    return type_info(kind)


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, Field]:
    info = _type(kind)
    assert isinstance(info, StructType)
    return {field.encode_name: field for field in info.fields}


def _plain(kind: Type) -> Type:
    """A type without the help that stands beside it."""
    return kind.type if isinstance(kind, Metadata) else kind


def _holds_structs(kind: Type) -> bool:
    parts = kind.types if isinstance(kind, UnionType) else (kind,)
    return any(isinstance(part, StructType) for part in parts)
