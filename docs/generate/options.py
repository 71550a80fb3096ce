"""Flags, from the structs that the command line is made of."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from quire.cli.flags import ENGINE, SERVER, SHORT
from words import default, escaped, kind

AUTO_LENGTH = "max_model_len"


def engine_flags() -> str:
    """Those that every command which loads a model has, and `LLM` by the same names with underscores."""
    return "\n".join(section(f"### {panel}", struct) for panel, struct in ENGINE.items())


def server_flags() -> str:
    """Those of `quire serve` alone."""
    return flags_of(SERVER["Server"])


def section(head: str, struct: type[msgspec.Struct]) -> str:
    """A heading, what the struct says of itself, its flags."""
    return f"{head}\n\n{' '.join((struct.__doc__ or '').split())}\n\n{flags_of(struct)}"


def flags_of(struct: type[msgspec.Struct]) -> str:
    """Every field as a heading, which searches and links find, and a line: value, default, meaning."""
    return "\n".join(flag(field) for field in msgspec.structs.fields(struct))


def flag(field: msgspec.structs.FieldInfo) -> str:
    """One flag, with an anchor of its name."""
    told, meta = get_args(field.type)[:2]
    name = field.name.replace("_", "-")
    spelled = f"--{name}" + (f", --no-{name}" if told in (bool, bool | None) else "")
    spelled += f", {SHORT[field.name]}" if field.name in SHORT else ""
    first, value = shown_default(field), value_of(told, meta)
    said = "; ".join(part for part in (value, f"default {first}" if first else "") if part)
    return f"#### {spelled} {{ #{name} }}\n\n{escaped(meta.description or '')}{f' ({said})' if said else ''}\n"


def value_of(told: Any, meta: msgspec.Meta) -> str:
    """What may stand behind the flag."""
    choices = (meta.extra or {}).get("choices", ())
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    return "" if told in (bool, bool | None) else kind(told)


def shown_default(field: msgspec.structs.FieldInfo) -> str:
    """As the command line shows it."""
    return "`auto`" if field.name == AUTO_LENGTH else default(field)
