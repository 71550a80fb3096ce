"""What each field of bodies means, for /openapi.json and the documents: its help, or why it is refused."""

from __future__ import annotations

from functools import cache
from typing import Annotated, get_args, get_origin

import msgspec

from quire.server.apis.unsupported import UNBUILT, WITHOUT_EFFECT

NO_EFFECT = "Ignored: it cannot change the output. The Warning header names it."


@cache
def help_of(body: type[msgspec.Struct]) -> dict[str, str]:
    """The meaning of each field of `body`. `KeyError` for a field that says none and is not refused either."""
    return {field.name: _help(field.name, field.type) for field in msgspec.structs.fields(body)}


def _help(name: str, kind: object) -> str:
    if get_origin(kind) is Annotated:
        said = [part.description for part in get_args(kind)[1:] if isinstance(part, msgspec.Meta)]
        if said and said[0]:
            return said[0]
    return NO_EFFECT if name in WITHOUT_EFFECT else f"Refused: {UNBUILT[name][1]}."


def describe(schema: dict[str, object], body: type[msgspec.Struct]) -> None:
    """Write the help of its fields into the schema of a body."""
    properties = schema["properties"]
    assert isinstance(properties, dict)
    for name, text in help_of(body).items():
        properties[name]["description"] = text
