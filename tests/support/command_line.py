"""The command line as users type it: run in this process, or only parsed."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import click
import pytest

from quire.cli import main
from quire.cli.app import app


def parse(words: list[str]) -> None:
    """As the command line does, without running anything."""
    command: click.Command = app
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0]) if words else None
        assert found is not None, f"quire has no command {words[:1]}"
        command, words = found, words[1:]
    try:
        command.make_context(command.name, list(words))
    except click.MissingParameter:
        pass  # a line may name a command, and not all that it needs
    except click.UsageError as error:
        raise AssertionError(f"{' '.join(words)}: {type(error).__name__}: {error}") from None


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("serve", "--port", "x", stdin=b"...")` -> (exit code, stdout, stderr)."""

    def call(*args: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["quire", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        found = capsys.readouterr()
        return (code if isinstance(code, int) else 0), found.out, found.err

    return call
