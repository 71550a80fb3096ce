"""Completion in shells: what bash, zsh and fish themselves make of the scripts, where they are installed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import Run, run
from quire.core import running
from quire.core.running import RunningServer, registered
from quire.store.manifest import Manifest, write
from terminal import Terminal

__all__ = ["run"]
ASKED = [
    ("quire ser", ["serve"]),
    ("quire bench ser", ["serve"]),
    ("quire serve --max-num-s", ["--max-num-seqs"]),
    ("quire chat --device ref", ["reference"]),
    ("quire run tin", ["tiny:1b", "tiny:2b"]),
    ("quire serve tiny:1", ["tiny:1b"]),
    ("quire show tin", ["tiny:1b", "tiny:2b"]),
    ("quire rm tiny:2", ["tiny:2b"]),
    ("quire pull qwen3:0", ["qwen3:0.6b"]),
    ("quire help bench la", ["latency"]),
    ("quire help ser", ["serve"]),
    ("quire completion z", ["zsh"]),
    ("quire nothing ser", ["serve"]),
]
"""What is typed before the tab key, and all that it may become."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the command `quire`, and a store with two models in `models`."""
    path = tmp_path_factory.mktemp("completion")
    tool = path / "quire"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m quire "$@"\n')
    tool.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_MODELS", str(path / "models"))
        for name in ("tiny:1b", "tiny:2b"):
            file = path / f"{name[-2:]}.gguf"
            file.write_bytes(b"GGUF")
            write(Manifest(name=name, path=str(file), source="hub:o/m", revision="1", quantization="Q8_0", size=4))
    return path


@pytest.fixture
def environment(place: Path) -> dict[str, str]:
    return {
        "PATH": f"{place}{os.pathsep}{os.environ['PATH']}",
        "QUIRE_MODELS": str(place / "models"),
        "HOME": str(place),
        "ZDOTDIR": str(place),
    }


def shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def in_bash(line: str, run: Run, environment: dict[str, str]) -> list[str]:
    """What the function of the script replies in a bash that splits words at colons."""
    script = run("completion", "bash")[1]
    words = _split(line)
    typed = " ".join(shlex.quote(word) for word in words)
    ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _quire_completion quire"
    show = 'printf "%s\\n" "${COMPREPLY[@]}"'
    ended = subprocess.run(
        [shell("bash"), "--norc", "-c", f"{script}\n{ask}\n{show}\n"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    return ended.stdout.split()


def _split(line: str) -> list[str]:
    found = []
    for word in line.split(" "):
        head, mark, tail = word.partition(":" if ":" in word else "=")
        found += [head, mark, tail] if mark else [word]
    return found


@pytest.mark.parametrize(("line", "found"), ASKED)
def test_words_are_completed_in_bash(line: str, found: list[str], run: Run, environment: dict[str, str]) -> None:
    """Behind a colon bash wants what stands behind that alone."""
    last = line.rpartition(" ")[2]
    cut = last.rpartition(":")[0] + ":" if ":" in last else ""
    assert in_bash(line, run, environment) == [word.removeprefix(cut) for word in found]


def test_values_behind_an_equals_sign_are_completed_in_bash(run: Run, environment: dict[str, str]) -> None:
    assert in_bash("quire chat --device=ref", run, environment) == ["reference"]
    assert in_bash("quire chat --device=", run, environment) == ["auto", "cuda", "cpu", "reference"]


@pytest.mark.parametrize(("line", "found"), ASKED)
def test_words_are_completed_in_fish(line: str, found: list[str], run: Run, environment: dict[str, str]) -> None:
    fish = shell("fish")
    folder = Path(environment["HOME"]) / ".config" / "fish" / "completions"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "quire.fish").write_text(run("completion", "fish")[1])
    ended = subprocess.run(
        [fish, "-c", f"complete -C {shlex.quote(line)}"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    assert sorted(row.partition("\t")[0] for row in ended.stdout.splitlines()) == sorted(found), ended.stderr


def test_words_are_completed_in_zsh(run: Run, environment: dict[str, str]) -> None:
    """The file lies where the script says that it goes, and compinit finds it by its first line."""
    zsh, home = shell("zsh"), Path(environment["HOME"])
    (home / ".zfunc").mkdir()
    (home / ".zfunc" / "_quire").write_text(run("completion", "zsh")[1])
    (home / ".zshrc").write_text("PROMPT='%% '\nfpath=(~/.zfunc $fpath)\nautoload -Uz compinit; compinit -u\n")
    start = f"import os; os.execv({zsh!r}, ['zsh', '-i'])"
    with Terminal(["-c", start], environment | {"TERM": "dumb"}) as terminal:
        terminal.wait("% ")
        for line, found in ASKED:
            if len(found) == 1:
                terminal.press(f"{line}\t".encode())
                terminal.wait(found[0].removeprefix(line.rpartition(" ")[2]) + " ")
                terminal.press(b"\x15")
        terminal.type("\x15exit")
        assert terminal.process.wait(10) == 0


def test_servers_that_run_are_completed(
    run: Run, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "cache_folder", lambda: tmp_path / "quire")
    own = RunningServer(pid=os.getpid(), address="http://a:1", models=("mine", "other"), started=0.0)
    with registered(own):
        assert in_bash("quire stop mi", run, environment | {"XDG_CACHE_HOME": str(tmp_path)}) == ["mine"]


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script(run: Run, name: str) -> None:
    code, out, _ = run("completion", name)
    assert code == 0 and "_QUIRE_COMPLETE" in out and f"# quire completion {name} > ~/" in out
    assert run("completion", "tcsh")[0] == 2
