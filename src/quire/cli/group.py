"""Groups of commands that are imported when they are called: help lists them from a table."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem


class Listed(NamedTuple):
    """A command in a table: where it is, as module:name, the first line of its help, and its heading there."""

    place: str
    line: str
    group: str = "Commands"


EXAMPLES = ("run", "generate", "serve", "latency", "throughput")
"""Commands that take what others' programs without commands do."""


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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split off the group's own flags; the error of another flag says that flags stand behind a command."""
        own = {name for param in self.params for name in param.opts} | set(ctx.help_option_names)
        flag = args[0].partition("=")[0] if args else ""
        if flag.startswith("-") and flag not in own and not ctx.resilient_parsing:
            names = [name for name in EXAMPLES if name in self.table] or list(self.table)
            shown = ", ".join(f"{ctx.command_path} {name} {flag} ..." for name in names[:3])
            ctx.fail(f"No such option {flag!r}: flags stand behind a command, as in {shown}")
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of `args`; where it is none, the error names what is quire's for another tool's
        command, or those that are spelled nearly so."""
        name = args[0]
        if name not in self.table and name[:1].isalnum() and not ctx.resilient_parsing:
            from quire.cli.foreign_commands import command_here
            from quire.core.options.values import near_names

            hint = command_here(name) if ctx.parent is None else ""
            if not hint and (found := near_names(name, self.table)):
                hint = f"Did you mean {', '.join(map(repr, found))}?"
            ctx.fail(f"No such command {name!r}. {hint}".rstrip())
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections of commands from the table."""
        width = max(map(len, self.table))
        limit = formatter.width - 6 - width
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, listed in self.table.items():
            sections.setdefault(listed.group, []).append((f"{name:{width}}", _first_clause(listed.line, limit)))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands that begin so, from the table, and the group's own flags."""
        found = [CompletionItem(name, help=x.line) for name, x in self.table.items() if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]


def _first_clause(line: str, limit: int) -> str:
    """`line`, or of one longer than `limit` what comes before the first colon, semicolon or full stop in it."""
    if len(line) <= limit:
        return line
    end = re.search(r"[;:.] ", line)
    return f"{line[: end.start()]}." if end else line
