"""Tables of flags, from the structs that the command line is made of."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from quire.cli.flags import ENGINE, SERVER, SHORT
from words import default, escaped, kind, table

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
    """Flag, type, default and meaning of every field."""
    return table(("flag", "value", "default", "meaning"), (row(field) for field in msgspec.structs.fields(struct)))


def row(field: msgspec.structs.FieldInfo) -> tuple[str, str, str, str]:
    """A line of the table, with an anchor of the flag's name."""
    told, meta = get_args(field.type)[:2]
    name = field.name.replace("_", "-")
    spelled = f"`--{name}`" + (f", `--no-{name}`" if told in (bool, bool | None) else "")
    spelled += f", `{SHORT[field.name]}`" if field.name in SHORT else ""
    return f'<a id="{name}"></a>{spelled}', value_of(told, meta), shown_default(field), escaped(meta.description or "")


def value_of(told: Any, meta: msgspec.Meta) -> str:
    """What may stand behind the flag."""
    choices = (meta.extra or {}).get("choices", ())
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    return "" if told in (bool, bool | None) else kind(told)


def shown_default(field: msgspec.structs.FieldInfo) -> str:
    """As the command line shows it."""
    return "`auto`" if field.name == AUTO_LENGTH else default(field)
