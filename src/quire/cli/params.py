"""Commands, options and arguments of the command line: click's, with help that names the type of every value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.cli.foreign_flags import Known, in_our_flags
from quire.core.options.fields import OptionField, Struct

if TYPE_CHECKING:
    from quire.core.options.aliases import Alias

OWN = "Options"
"""Heading of a command's own flags."""

HELP_ALL = "--help-all"
ALL = "quire.all_flags"
"""Under this name a context notes that help is to show all flags."""

PATH: click.Path = click.Path(path_type=Path)
"""A file or folder, as a `pathlib.Path`."""

NEAR, PREFIX = 0.8, 4
"""Share of letters that a flag has in common with what was meant as it, or letters that one begins with."""

SUFFIXES = {letter: 1000**power for power, letter in enumerate("kmgt", 1)}
SUFFIXES |= {letter: 1024**power for power, letter in enumerate("KMGT", 1)}
"""What the letter behind a number multiplies it by, as in vLLM's flags."""
SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")

KINDS = {"integer": "int", "integer range": "int range", "text": "str", "boolean": "bool"}
"""Names of types in help, where they are not click's own."""


def without_suffix(text: str) -> str:
    """The number that 4k, 25.6k (thousands) or 4K, 2G (powers of 1024) is, in digits; other texts as they are."""
    found = SUFFIXED.fullmatch(text.strip())
    if found is None:
        return text
    number = Fraction(found[1]) * SUFFIXES[found[2]]
    return str(number.numerator) if number.denominator == 1 else text


class Integer(click.types.IntParamType):
    """An integer, which may end with k, m, g, t (1k = 1000) or K, M, G, T (1K = 1024)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a number; a suffix multiplies it."""
        number: Any = without_suffix(value) if isinstance(value, str) else value
        return super().convert(number, param, ctx)


INTEGER = Integer()


def near_flags(given: str, known: Iterable[str]) -> list[str]:
    """Find the flags that are spelled as `given` but for a few letters, or begin as it does."""
    from difflib import SequenceMatcher

    def near(flag: str) -> bool:
        a, b = given.strip("-"), flag.strip("-")
        same = SequenceMatcher(None, a, b).ratio() >= NEAR
        return same or (min(len(a), len(b)) >= PREFIX and (a.startswith(b) or b.startswith(a)))

    return [flag for flag in known if near(flag)]


def _shown(param: click.Parameter, several: bool) -> str:
    """The type of a value in help: <int>, or <list[str]> where there may be several."""
    kind = KINDS.get(param.type.name, param.type.name)
    return f"<list[{kind}]>" if several else f"<{kind}>"


class Option(click.Option):
    """A flag. Its help ends with its default, its range, and whether it is required.

    `group` is the heading of help under which the flag stands. `field` is the option that the flag was made from; None
    where a command declares it. `rare`: help leaves it out, unless all flags are asked for.
    """

    def __init__(
        self,
        spellings: Sequence[str],
        *,
        group: str = OWN,
        field: OptionField | None = None,
        rare: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(spellings, **{"show_default": True} | more)
        self.group, self.field, self.rare = group, field, rare

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
        """Name that messages use."""
        return self.metavar or str(self.name)

    def get_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Write the line of usage: {NAME}, or [NAME] where it may be left out."""
        name = f"{{{self.human_readable_name}}}" if self.required else f"[{self.human_readable_name}]"
        return [name + "..." * (self.nargs != 1)]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Name and type, and its help."""
        several = self.nargs != 1
        name = self.human_readable_name + "..." * (several and self.metavar is None)
        return f"{name} {_shown(self, several)}", (self.help or "") + "  [required]" * self.required

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Name that errors use."""
        return f"'{self.human_readable_name}'"


class Command(click.Command):
    """A command; its help lists arguments first, then flags by groups.

    `groups` maps headings of help to the structs whose options are flags of the command. `examples`: command lines,
    and what each does. `foreign`: flags of other tools that mean something in this command alone. Where some flags are
    rare, `--help` leaves them out and `--help-all` shows them too.
    """

    def __init__(
        self,
        name: str,
        *,
        groups: Mapping[str, Struct] | None = None,
        examples: Sequence[tuple[str, str]] = (),
        foreign: tuple[Alias, ...] = (),
        **more: Any,
    ) -> None:
        super().__init__(name, **more)
        self.foreign = foreign
        self.groups, self.examples = groups or {}, tuple(examples)
        self.rare = sum(getattr(param, "rare", False) for param in self.params)
        if self.rare:
            self.params.append(_help_all())

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read flags, those of llama.cpp and vLLM too."""
        try:
            return super().parse_args(ctx, args if ctx.resilient_parsing else in_our_flags(args, self._known_flags()))
        except click.NoSuchOption as error:
            near = near_flags(error.option_name, error.possibilities or ())
            raise click.NoSuchOption(error.option_name, possibilities=near, ctx=ctx) from None

    def _known_flags(self) -> Known:
        options = [param for param in self.params if isinstance(param, click.Option)]
        takes = {spelling: not option.is_flag for option in options for spelling in option.opts}
        takes |= {spelling: False for option in options for spelling in (*option.secondary_opts, "-h", "--help")}
        names = {str(option.name): option.opts[0] for option in options}
        names |= {f"no_{option.name}": option.secondary_opts[0] for option in options if option.secondary_opts}
        return Known(takes, names, {spelling: row for row in self.foreign for spelling in row.spellings})

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Nothing: `format_options` writes arguments too, whatever the version of click."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section of arguments and one for each group of flags, the command's own first."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], OWN: []}
        for param in self.get_params(ctx):
            if getattr(param, "rare", False) and not ctx.meta.get(ALL):
                continue
            if (row := param.get_help_record(ctx)) is not None:
                title = "Arguments" if isinstance(param, click.Argument) else getattr(param, "group", OWN)
                sections.setdefault(title, []).append(row)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        if self.rare and not ctx.meta.get(ALL):
            formatter.write_paragraph()
            formatter.write_text(f"{self.rare} more flags: {ctx.command_path} {HELP_ALL}")
        if self.examples:
            with formatter.section("Examples"):
                formatter.write_dl(list(self.examples))


def _help_all() -> Option:
    """The flag that shows the help with every flag of its command."""

    def show(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
        if asked and not ctx.resilient_parsing:
            ctx.meta[ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return Option([HELP_ALL], is_flag=True, expose_value=False, is_eager=True, callback=show, help="Show all flags.")


def command(name: str, *params: click.Parameter) -> Callable[[Callable[..., Any]], Command]:
    """Make a function the command `name`, which is given its parameters by their names; help is the docstring."""

    def made(function: Callable[..., Any]) -> Command:
        return Command(name, params=list(params), callback=function, help=function.__doc__)

    return made


def option(*spellings: str, **more: Any) -> Option:
    """A flag of one command; `more` as `click.Option` takes it."""
    return Option(spellings, **more)


def quiet_option() -> Option:
    """The flag that silences progress, of commands that take long."""
    return option(
        "--quiet", "-q", is_flag=True, expose_value=False, callback=_silence, help="Show no progress, only results."
    )


def _silence(ctx: click.Context, _: click.Parameter, quiet: bool) -> None:
    if quiet:
        from quire.core.progress import silenced

        ctx.with_resource(silenced())


def argument(name: str, **more: Any) -> Argument:
    """A positional argument with `help`; `more` as `click.Argument` takes it."""
    return Argument([name], **more)
