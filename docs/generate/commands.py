"""Every command with its arguments and flags, from the command line itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from options import shown_default
from quire.cli.app import app
from quire.cli.flags import ENGINE, SERVER
from quire.engine.engine_options import UNBUILT
from words import escaped, table

SHARED: dict[str, frozenset[str]] = {
    "all [flags of the engine](flags.md#the-engine)": frozenset(
        name for struct in ENGINE.values() for name in struct.__struct_fields__
    ),
    "all [flags of the server](flags.md#the-server)": frozenset(SERVER["Server"].__struct_fields__),
}


def every_command() -> str:
    """A section for each."""
    return "\n".join(section(name, command) for name, command in walk("", app))


def walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """(name, command) of those that do something: groups are walked into."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for child in command.list_commands(context):
        found = command.get_command(context, child)
        assert found is not None
        yield from walk(f"{name} {child}".strip(), found)


def section(name: str, command: Any) -> str:
    """Heading, help, usage, flags of its own, and which it shares."""
    params = [p for p in command.params if not getattr(p, "hidden", False) and p.name not in ("help", "help_all")]
    arguments = [p for p in params if p.param_type_name == "argument"]
    given = {p.name for p in params}
    shared = [told for told, names in SHARED.items() if names <= given]
    known = frozenset().union(*(names for told, names in SHARED.items() if told in shared)) | frozenset(UNBUILT)
    own = [p for p in params if p.param_type_name == "option" and p.name not in known]
    usage = " ".join([f"quire {name}", *(usage_of(p) for p in arguments), "[flags]"])
    text = f"## quire {name}\n\n{' '.join((command.help or '').split())}\n\n```text\n{usage}\n```\n\n"
    rows = [(f"`{bare(p)}`", "", escaped(p.help or "")) for p in arguments]
    rows += [(flags(p), default(p), escaped(meaning(p))) for p in own]
    text += table(("argument or flag", "default", "meaning"), rows) + "\n" if rows else ""
    return text + (f"Also {' and '.join(shared)}.\n" if shared else "")


def bare(param: Any) -> str:
    """An argument as it is called."""
    return (param.metavar or param.name.upper()).strip("[]")


def usage_of(param: Any) -> str:
    """An argument in a line of usage."""
    told = param.metavar or param.name.upper()
    return told if param.required or told.startswith("[") else f"[{told}]"


def flags(param: Any) -> str:
    """All spellings of a flag, and what it takes."""
    spelled = ", ".join(f"`{flag}`" for flag in (*param.opts, *param.secondary_opts))
    return spelled + (f" {param.metavar.replace('|', ', ')}" if param.metavar else "")


def meaning(param: Any) -> str:
    """Its help, less the default that the command line writes behind it."""
    return param.field.help if made_of(param) else str(param.help or "")


def default(param: Any) -> str:
    """What it is where it is not given."""
    if made_of(param):
        shown = shown_default(param.field).strip("`")
        return f"`{shown}`" if shown else ""
    if getattr(param, "required", False):
        return "required"
    plain = isinstance(param.default, str | int | float) and param.default
    return f"`{param.default}`" if plain else ""


def made_of(param: Any) -> bool:
    """Whether the flag was made of a struct's field."""
    return getattr(param, "field", None) is not None
