"""Groups of commands that are imported when they are called: help lists them from a table."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import click


class Listed(NamedTuple):
    """A command in a table: where it is, as module:name, and the first line of its help."""

    place: str
    line: str


class LazyGroup(click.Group):
    """A group whose commands stand in a table, and are imported when they are called or their own help is asked."""

    def __init__(self, table: Mapping[str, Listed], **more: Any) -> None:
        super().__init__(**{"no_args_is_help": True} | more)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None where there is none of that name."""
        if cmd_name in self.table and cmd_name not in self.commands:
            module, _, name = self.table[cmd_name].place.partition(":")
            self.add_command(getattr(importlib.import_module(module), name), cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of `args`; where it is none, the error names those that are spelled nearly so."""
        name = args[0]
        if name not in self.table and name[:1].isalnum():
            from quire.core.options.values import near_names

            found = near_names(name, self.table)
            hint = f" Did you mean {', '.join(map(repr, found))}?" if found else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the section of commands from the table."""
        limit = formatter.width - 6 - max(map(len, self.table))
        rows = [(name, click.Command(name, help=x.line).get_short_help_str(limit)) for name, x in self.table.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
