"""What commands import: help lists commands from a table, which says what they say, and imports none of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from quire.cli.app import app
from quire.cli.group import LazyGroup
from tiny_model import write_tiny

AFTER = """
import atexit, sys
atexit.register(lambda: print("imported", *sorted({name.split(".")[0] for name in sys.modules}), file=sys.stderr))
from quire.cli import main
main()
"""
"""A command, and the names of all that it imported."""


def imports_of(*words: str) -> set[str]:
    found = subprocess.run([sys.executable, "-c", AFTER, *words], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    [line] = [line for line in found.stderr.splitlines() if line.startswith("imported ")]
    return set(line.split()[1:])


def groups(command: click.Command) -> list[LazyGroup]:
    """A group and those in it; all commands are imported."""
    if not isinstance(command, LazyGroup):
        return []
    context = click.Context(command)
    found = [command.get_command(context, name) for name in command.list_commands(context)]
    return [command, *(group for each in found if each is not None for group in groups(each))]


def test_a_table_says_what_its_commands_say() -> None:
    seen = 0
    for group in groups(app):
        context = click.Context(group)
        for name, listed in group.table.items():
            command = group.get_command(context, name)
            assert command is not None and command.name == name
            first, *_ = (command.help or "").split("\n\n")
            assert listed.line == " ".join(first.split()), name
            seen += 1
    assert seen > 20


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["bench", "--help"]])
def test_help_imports_no_command(words: list[str]) -> None:
    assert not imports_of(*words) & {"torch", "numpy", "typer", "pydantic", "msgspec", "rich", "zmq", "tokenizers"}


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_what_reads_headers_imports_no_torch(command: str, tmp_path: Path) -> None:
    device = ["--device", "h100"] if command == "plan" else []
    found = imports_of(command, str(write_tiny(tmp_path)), "--load-format", "dummy", *device)
    assert not found & {"torch", "transformers", "triton", "starlette", "typer", "pydantic"}
