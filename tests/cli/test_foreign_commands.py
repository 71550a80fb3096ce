"""Commands and variables of the environment of other tools: what a user of theirs is told, and keys that count here."""

from __future__ import annotations

import click
import pytest

from command_line import Run, parse, run
from quire.cli.app import COMMANDS, app
from quire.cli.foreign_commands import COMMANDS as FOREIGN
from quire.cli.foreign_commands import NONE, command_here, keys_of, unread_variables
from quire.cli.params import Command
from quire.core.errors import ConfigError

__all__ = ["run"]


@pytest.mark.parametrize("name", [*FOREIGN, *NONE])
def test_a_command_of_another_tool_is_told_ours(run: Run, name: str) -> None:
    assert name not in COMMANDS
    code, out, err = run(name, "x")
    assert (code, out) == (2, "") and f"No such command '{name}'. quire" in err and "Did you mean" not in err
    if name in FOREIGN:
        words = FOREIGN[name].partition(", or ")[0].partition(":")[0].replace("[PROMPT]", "PROMPT").split()
        parse(words)


def test_others_are_guessed_as_before(run: Run) -> None:
    assert "No such command 'serv'. Did you mean 'serve'" in run("serv")[2]
    assert run("qwertyuiop")[2].rstrip().endswith("No such command 'qwertyuiop'.")
    assert "Did you mean 'serve'?" in run("bench", "server")[2], "groups within have commands of their own"
    assert command_here("Llama_Server") == command_here("llama-server") != ""


def serve_flags() -> list[str]:
    found = app.get_command(click.Context(app), "serve")
    assert isinstance(found, Command)
    return [spelling for param in found.params for spelling in param.opts]


def test_variables_of_others_are_named_in_one_line() -> None:
    flags = serve_flags()
    assert unread_variables({"PATH": "/bin"}, "serve", flags) == ""
    found = {
        "OLLAMA_HOST": "0.0.0.0:11434",
        "LLAMA_ARG_CTX_SIZE": "4096",
        "LLAMA_ARG_N_PARALLEL": "4",
        "OLLAMA_MODELS": "",
    }
    told = unread_variables(found, "serve", flags)
    assert "\n" not in told and all(name in told for name in found)
    assert "--host 0.0.0.0 --port 11434" in told and "--max-model-len" in told and "--max-num-seqs" in told
    assert "QUIRE_MODELS" in told
    assert "--host 10.0.0.1" in unread_variables({"OLLAMA_HOST": "10.0.0.1"}, "serve", flags)
    assert "--host h --port 1," not in unread_variables({"OLLAMA_HOST": "http://h:1"}, "serve", flags)
    assert "--host h --port 1" in unread_variables({"OLLAMA_HOST": "http://h:1/"}, "serve", flags)
    assert "--server http://h:1" in unread_variables({"OLLAMA_HOST": "h:1"}, "run", flags)
    assert "LLAMA_ARG_RPC has none" in unread_variables({"LLAMA_ARG_RPC": "h:1"}, "serve", flags)
    for name, flag in (
        ("HOST", "--host"),
        ("THREADS", "--threads"),
        ("N_GPU_LAYERS", "--device"),
        ("ALIAS", "--served-model-name"),
    ):
        assert flag in unread_variables({f"LLAMA_ARG_{name}": "1"}, "serve", flags)


def test_run_warns_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "4096")
    code, _, err = run("run", "-m", "./no-such-model", "hello")
    assert code == 2 and err.count("LLAMA_ARG_CTX_SIZE: of another tool, and not read; give --max-model-len") == 1


def test_a_key_in_the_environment_locks_the_server(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys_of({"LLAMA_API_KEY": "a, b", "VLLM_API_KEY": "c"}) == ("a", "b", "c")
    assert keys_of({"LLAMA_API_KEY": "", "VLLM_API_KEY": " "}) == ()
    seen = []

    def to_server(options: dict[str, object]) -> None:
        seen.append(options.get("api_key"))
        raise ConfigError("enough")

    monkeypatch.setattr("quire.cli.serve.to_server", to_server)
    assert "key" not in run("serve")[2]
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    err = run("serve")[2]
    assert "clients need the key of VLLM_API_KEY, as no --api-key was given" in err and "secret" not in err
    assert "VLLM" not in run("serve", "--api-key", "given")[2] + run("serve", "--api-keys-file", "f")[2]
    assert seen == [None, ["secret"], ["given"], None]
