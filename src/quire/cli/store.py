"""`quire pull`, `list`, `show` and `rm`: the models on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from quire.cli.complete import complete_known, complete_model, complete_pulled
from quire.cli.params import argument, command, option
from quire.cli.show import Rows, show
from quire.core.errors import ConfigError

AS_JSON = option("--json", "as_json", is_flag=True, help="Print JSON.")


@command(
    "pull",
    argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_known, help="A name of `quire list --known`, or owner/model[:quantization] on the Hugging Face Hub."),  # noqa: E501
    option("--revision", help="Branch, tag or commit of a model on the Hub."),
    option("--default", "as_default", is_flag=True, help="Have commands without a model take this one from now on."),
    AS_JSON,
)  # fmt: skip
def pull(names: tuple[str, ...], revision: str | None, as_default: bool, as_json: bool) -> None:
    """Download models by name. A pull that was cut off goes on where it ended."""
    from quire.store.hub import Hub
    from quire.store.manifest import mark_default
    from quire.store.progress import Shown, amount
    from quire.store.pull import pull as pull_one

    if as_default and len(names) > 1:
        raise ConfigError("--default: one model is the default; pull it alone", param="default")
    pulled = []
    with Shown() as progress:
        for name in names:
            pulled.append(pull_one(name, progress, Hub(revision)))
    if as_default:
        mark_default(pulled[0].name)
    if as_json:
        print(json.dumps([_facts(each.name) for each in pulled], indent=2))
        return
    for each in pulled:
        facts = ", ".join(word for word in (amount(each.size), each.quantization, each.license) if word)
        print(f"{each.name}: {facts}, in {each.place}")
        print(f"  next: quire {'run' if each.kind == 'chat' else 'serve'} {each.name}")


@command(
    "list",
    option("--known", is_flag=True, help="List the names that `quire pull` knows, instead of what is here."),
    AS_JSON,
)
def list_models(known: bool, as_json: bool) -> None:
    """List the models on this machine: those that were pulled, and those in the hub's cache that quire can run."""
    from quire.cli.stored import known_rows, local_rows

    rows = known_rows() if known else local_rows()
    if as_json:
        print(json.dumps([row.facts for row in rows], indent=2))
        return
    if not rows:
        print("no model is here yet but the bundled one (pydoc). Run: quire pull smollm2")
        return
    _print_table([row.cells for row in rows], list(rows[0].facts))


def _print_table(rows: list[list[str]], headings: list[str]) -> None:
    """Print columns as wide as they need to be, headings in capital letters."""
    titled = [[word.upper() for word in headings[: len(rows[0])]], *rows]
    widths = [max(len(row[i]) for row in titled) for i in range(len(titled[0]))]
    for row in titled:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@command(
    "show",
    argument(
        "name",
        metavar="NAME",
        shell_complete=complete_model,
        help="A model of `quire list`, or the path of a folder or GGUF file.",
    ),
    option("--template", is_flag=True, help="Print the chat template alone."),
    AS_JSON,
)
def show_model(name: str, template: bool, as_json: bool) -> None:
    """Show a model: architecture, parameters, context, quantization, license, template and sampling defaults."""
    from quire.cli.stored import template_of

    if template:
        print(template_of(name) or "")
        return
    facts = _facts(name)
    if as_json:
        print(json.dumps(facts | {"template": template_of(name)}, indent=2))
        return
    show(name, [(key.replace("_", " "), value) for key, value in _words(facts)])


def _words(facts: dict[str, Any]) -> Rows:
    from quire.store.progress import amount

    rows = []
    for key, value in facts.items():
        if key == "size":
            value = amount(value)
        elif isinstance(value, dict):
            value = ", ".join(f"{name}={number}" for name, number in value.items()) or "no defaults"
        elif isinstance(value, int):
            value = f"{value:,}"
        if value and key != "name":
            rows.append((key, str(value)))
    return rows


def _facts(name: str) -> dict[str, Any]:
    from quire.cli.stored import facts_of

    return facts_of(name)


@command(
    "rm",
    argument(
        "names",
        metavar="NAME...",
        nargs=-1,
        required=True,
        shell_complete=complete_pulled,
        help="Models of `quire list`.",
    ),
    option("--yes", "-y", is_flag=True, help="Do not ask."),
)
def remove(names: tuple[str, ...], yes: bool) -> None:
    """Remove models from this machine."""
    from quire.cli.stored import removable
    from quire.store.progress import amount

    chosen = [removable(name) for name in names]
    for each in chosen:
        if not yes:
            if not sys.stdin or not sys.stdin.isatty():
                raise ConfigError(f"rm {each.name}: nobody can be asked here; say --yes", param="yes")
            told = f"Remove {each.name} ({amount(each.size)}, {_short(each.path)})?"
            if not click.confirm(told):
                raise click.exceptions.Exit(1)
        kept = f"; its files stay, {', '.join(each.others)} needs them" if each.others else ""
        print(f"removed {each.name}: {amount(each.remove())} came free{kept}")


def _short(path: Path) -> str:
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)
