"""Help, completion and the servers that run: what a user sees of commands before knowing them."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from command_line import Run, parse, run
from quire.cli.app import COMMANDS, app
from quire.cli.params import Command
from quire.core import running
from quire.core.running import RunningServer, registered, servers
from serving_process import Serving

__all__ = ["run"]
SHELL_COMMANDS = [name for name in COMMANDS if name != "bench"]


def command(name: str) -> Command:
    found = app.get_command(click.Context(app), name)
    assert isinstance(found, Command)
    return found


def test_help_of_serve_is_short_and_all_of_it_is_there(run: Run) -> None:
    _, short, _ = run("serve", "--help")
    _, whole, _ = run("serve", "--help-all")
    serve = command("serve")
    shown = [p for p in serve.params if isinstance(p, click.Option) and not p.hidden and not getattr(p, "rare", False)]
    assert 20 <= len(shown) <= 32 and short.count("\n") < 125 < 300 < whole.count("\n")
    assert f"{serve.rare} more flags: quire serve --help-all" in short and "more flags" not in whole
    assert "--kv-store-gb" in whole and "--kv-store-gb" not in short
    assert [line for line in ("Model:", "KV cache:", "Scheduler:", "Server:", "Examples:") if line not in short] == []


@pytest.mark.parametrize("name", ["serve", "chat", "run"])
def test_examples_are_command_lines(name: str) -> None:
    assert len(command(name).examples) == 3
    for line, meaning in command(name).examples:
        words = line.partition("| ")[2] or line
        parse(shlex.split(words)[1:])
        assert meaning


@pytest.mark.parametrize("words", [[], ["bench"], ["bench", "serve"], ["ps"]])
def test_help_is_a_command(run: Run, words: list[str]) -> None:
    code, out, _ = run("help", *words)
    assert code == 0 and out.startswith(" ".join(["Usage: quire", *words]))
    assert run(*words, "--help")[1].split("\n", 1)[1] == out.split("\n", 1)[1]


def test_help_of_what_is_no_command(run: Run) -> None:
    code, _, err = run("help", "serv")
    assert code == 2 and "Did you mean 'serve'?" in err
    assert run("help", "serve", "--all")[1] == run("serve", "--help-all")[1]
    assert run("help", "ps", "stop")[0] == 2


def test_servers_that_run_are_listed_and_stopped(run: Run) -> None:
    code, out, _ = run("ps")
    assert code == 0 and "no server" in out
    assert run("stop")[0] == 2
    with Serving() as serving, serving.up() as client:
        [row] = json.loads(run("ps", "--json")[1])
        assert row["models"] == ["pydoc"] and row["address"] == str(client.base_url)
        assert row["memory_bytes"] > 20e6 and (row["running"], row["waiting"]) == (0, 0)
        assert "pydoc" in run("ps")[1]
        port = row["address"].rpartition(":")[2]
        code, _, err = run("serve", "--port", port)
        assert code == 2 and f"{port} is in use" in err
        code, _, err = run("stop", "other")
        assert code == 2 and "pydoc on" in err
        code, out, _ = run("stop", "pydoc")
        assert code == 0 and "stopped pydoc" in out
        assert serving.process.wait(5) == 0
    log = "".join(serving.log)
    assert "/dashboard" in log and "memory:" in log and "/openapi.json" in log
    assert json.loads(run("ps", "--json")[1]) == []


def test_what_a_killed_server_left_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "cache_folder", lambda: tmp_path)
    code = (
        "import os, signal, pathlib, sys\n"
        "from quire.core import running\n"
        "running.cache_folder = lambda: pathlib.Path(sys.argv[1])\n"
        "own = running.RunningServer(pid=os.getpid(), address='http://a:1', models=('m',), started=0.0)\n"
        "with running.registered(own):\n"
        "    print('up', flush=True)\n"
        "    signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert [server.pid for server in servers()] == [process.pid]
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(list((tmp_path / "run").iterdir())) == 1
    assert servers() == [] and not list((tmp_path / "run").iterdir())


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(running, "cache_folder", lambda: tmp_path / "file")
    with registered(RunningServer(pid=1, address="a", models=(), started=0.0)):
        assert servers() == []


@pytest.mark.parametrize("words", [["-m", "file.gguf"], ["bench", "-m", "file.gguf"]])
def test_a_flag_without_a_command_is_told_where_it_stands(words: list[str]) -> None:
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 2 and "No such option '-m': flags stand behind a command" in found.output
