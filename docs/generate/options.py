"""Flags, from the structs that the command line is made of."""

from __future__ import annotations

import msgspec

from quire.cli.flags import ENGINE, SERVER, SHORT
from quire.core.options.fields import OptionField, fields_of
from words import escaped, kind, written

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
    return "\n".join(flag(field) for field in fields_of(struct))


def flag(field: OptionField) -> str:
    """One flag, with an anchor of its name."""
    name = field.flag.removeprefix("--")
    spelled = field.flag + (f", --no-{name}" if switched(field) else "")
    spelled += f", {SHORT[field.name]}" if field.name in SHORT else ""
    first, value = shown_default(field), value_of(field)
    said = "; ".join(part for part in (value, f"default {first}" if first else "") if part)
    return f"#### {spelled} {{ #{name} }}\n\n{escaped(field.help)}{f' ({said})' if said else ''}\n"


def switched(field: OptionField) -> bool:
    """Whether the flag is on or off, and takes no value."""
    return field.plain in (bool, bool | None)


def value_of(field: OptionField) -> str:
    """What may stand behind the flag."""
    if field.choices:
        return ", ".join(f"`{choice}`" for choice in field.choices)
    return "" if switched(field) else kind(field.plain)


def shown_default(field: OptionField) -> str:
    """As the command line shows it."""
    return "`auto`" if field.name == AUTO_LENGTH else written(field.default)
