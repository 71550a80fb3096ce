"""Commands, options and arguments of the command line: click's, with help that names the type of every value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

PATH: click.Path = click.Path(path_type=Path)
"""A file or folder, as a `pathlib.Path`."""

KINDS = {"integer": "int", "integer range": "int range", "text": "str", "boolean": "bool"}
"""Names of types in help, where they are not click's own."""


def _shown(param: click.Parameter, several: bool) -> str:
    """The type of a value in help: <int>, or <list[str]> where there may be several."""
    kind = KINDS.get(param.type.name, param.type.name)
    return f"<list[{kind}]>" if several else f"<{kind}>"


class Option(click.Option):
    """A flag. Its help ends with its default, its range, and whether it is required."""

    def __init__(self, spellings: Sequence[str], **more: Any) -> None:
        super().__init__(spellings, **{"show_default": True} | more)

    def make_metavar(self, ctx: click.Context) -> str:
        """The choices or the name of its value, else its type."""
        return self.metavar or _shown(self, self.multiple)


class Argument(click.Argument):
    """A positional argument, which has help as a flag has."""

    def __init__(self, names: Sequence[str], *, help: str, **more: Any) -> None:
        super().__init__(names, **more)
        self.help = help

    @property
    def human_readable_name(self) -> str:
        """As messages name it."""
        return self.metavar or str(self.name)

    def get_usage_pieces(self, ctx: click.Context) -> list[str]:
        """In the line of usage: {NAME}, or [NAME] where it may be left out."""
        name = f"{{{self.human_readable_name}}}" if self.required else f"[{self.human_readable_name}]"
        return [name + "..." * (self.nargs != 1)]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Name and type, and its help."""
        several = self.nargs != 1
        name = self.human_readable_name + "..." * (several and self.metavar is None)
        return f"{name} {_shown(self, several)}", (self.help or "") + "  [required]" * self.required

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """As errors name it."""
        return f"'{self.human_readable_name}'"


class Command(click.Command):
    """A command; its help lists arguments before flags."""

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Nothing: `format_options` writes arguments too, whatever the version of click."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections of arguments and of options."""
        params = self.get_params(ctx)
        for title, kind in (("Arguments", click.Argument), ("Options", click.Option)):
            rows = [row for p in params if isinstance(p, kind) and (row := p.get_help_record(ctx)) is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def command(name: str) -> Callable[[Callable[..., Any]], Command]:
    """Make a function, with the `option`s and `argument`s that it is given, the command `name`."""
    return click.command(name, cls=Command)


def option(*spellings: str, **more: Any) -> Callable[[F], F]:
    """Give a command a flag; `more` as `click.option` takes it."""
    return click.option(*spellings, cls=Option, **more)


def argument(name: str, **more: Any) -> Callable[[F], F]:
    """Give a command a positional argument with `help`; `more` as `click.argument` takes it."""
    return click.argument(name, cls=Argument, **more)
