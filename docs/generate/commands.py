"""Every command with its arguments and flags, from the command line itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import msgspec

from quire.cli.app import app
from quire.cli.flags import ENGINE, SERVER
from quire.engine.options import UNBUILT
from words import escaped, table

SHARED: dict[str, frozenset[str]] = {
    "all [flags of the engine](flags.md#the-engine)": frozenset(
        field.name for struct in ENGINE.values() for field in msgspec.structs.fields(struct)
    ),
    "all [flags of the server](flags.md#the-server)": frozenset(
        field.name for field in msgspec.structs.fields(SERVER["Server"])
    ),
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
    params = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
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
    return str(param.help or "").rpartition(" [")[0] if default_in_help(param) else str(param.help or "")


def default(param: Any) -> str:
    """What it is where it is not given."""
    if default_in_help(param):
        return f"`{param.help.rpartition(' [')[2].rstrip(']')}`"
    if getattr(param, "required", False):
        return "required"
    plain = isinstance(param.default, str | int | float) and param.default
    return f"`{param.default}`" if plain else ""


def default_in_help(param: Any) -> bool:
    """Whether the flag was made of a struct's field, whose default stands at the end of its help."""
    return bool(param.help) and param.help.endswith("]") and " [" in param.help
