"""Words of a command line that are a model, a path or a text: what each is taken for, and what a wrong one is told."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from command_line import Run, run
from quire.cli.flags import to_arguments
from quire.model.disk.checkpoint import resolve
from quire.store.names import is_path_name, local_path
from serving_process import serving
from tiny_model import OPTIONS, write_tiny

__all__ = ["run"]
SHORT = ["-n", "4", "--temperature", "0", "--num-blocks", "64"]
FLAGS = [*to_arguments(OPTIONS), "-n", "4", "--temperature", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("tiny")))


def test_words_are_the_prompt_where_the_model_is_given_by_its_flag(run: Run, folder: str) -> None:
    code, asked, err = run("run", folder, "ab", "cd", *FLAGS)
    assert code == 0, err
    assert run("run", "-m", folder, "ab", "cd", *FLAGS)[:2] == (0, asked)
    assert run("run", "--model", folder, "ab cd", *FLAGS)[:2] == (0, asked)
    assert run("run", folder, "--model", folder, "ab cd", *FLAGS)[:2] == (0, asked), "the same model twice is one"


def test_a_chat_may_begin_with_words(run: Run, folder: str) -> None:
    _, typed, _ = run("chat", folder, *FLAGS, stdin=b"ab cd\nef\n")
    assert run("chat", "-m", folder, "ab", "cd", *FLAGS, stdin=b"ef\n")[:2] == (0, typed)
    assert run("chat", folder, "ab cd", *FLAGS, stdin=b"ef\n")[:2] == (0, typed)


NAMES = ("missing.gguf", "some/missing.gguf", "model.safetensors", "./m", "../m/x", "/no/such", "~/no-such", "a/b/c/d")
COMMANDS = (("run", "-m"), ("chat",), ("show",), ("pull",))


@pytest.mark.parametrize(
    "line", [*[("inspect", name) for name in NAMES], *[(*words, "o/m.gguf") for words in COMMANDS]]
)
def test_a_path_where_nothing_lies_is_said_to_be_that(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*line, stdin=b"hello")
    assert code == 2 and f"{line[-1]}: no such file or folder" in err and "hub" not in err, err


def test_names_of_the_hub_are_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("owner/model", "owner/model:Q4_K_M", "owner/model/FILE.gguf", "smollm2", "name.v2"):
        assert not is_path_name(name), name
    (tmp_path / "owner").mkdir()
    assert is_path_name("owner/model/FILE.gguf"), "its first part is a folder here"


@pytest.mark.parametrize(
    "words", [("some/model", "a text"), ("missing.gguf", "a text"), ("missing.gguf",), ("./m", "x")]
)
def test_a_missing_model_is_not_taken_as_a_text(run: Run, words: tuple[str, ...]) -> None:
    code, out, err = run("generate", *words)
    assert (code, out) == (2, "") and f"{words[0]}: no such file or folder" in err and "--model" in err


def test_a_text_with_a_slash_is_a_text(run: Run, folder: str) -> None:
    code, out, _ = run("generate", "-m", folder, "and/or", "x", *FLAGS)
    assert code == 0 and "=== and/or" in out


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one GGUF file, as quire compress writes it."""
    from quire.compress.layouts.gguf import write_gguf
    from quire.model.disk.checkpoint import EMBEDDED

    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(EMBEDDED, folder / "pydoc-Q8_0.gguf", "Q8_0")
    (folder / "README.md").touch()
    return folder


def test_a_folder_of_one_gguf_file_is_that_model(run: Run, gguf: Path) -> None:
    [file] = gguf.glob("*.gguf")
    assert resolve(str(gguf)) == local_path(str(gguf)) == file
    assert run("generate", str(gguf), "def", *SHORT)[:2] == run("generate", str(file), "def", *SHORT)[:2]
    code, out, err = run("run", str(gguf), "def", *SHORT)
    assert code == 0 and out, err
    assert str(file) in run("inspect", str(gguf))[1]


def test_of_several_gguf_files_one_is_to_be_named(run: Run, gguf: Path, tmp_path: Path) -> None:
    [file] = gguf.glob("*.gguf")
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").symlink_to(file)
    assert resolve(str(tmp_path)).name == "m-00001-of-00002.gguf", "shards are one model"
    (tmp_path / "other.gguf").symlink_to(file)
    code, _, err = run("inspect", str(tmp_path))
    assert code == 2 and f"name one of them: {tmp_path}/m-00001-of-00002.gguf, {tmp_path}/other.gguf" in err


@pytest.mark.slow
def test_what_compress_prints_as_next_can_be_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("compress", "pydoc", "q4km", "--quantize", "gguf", "--no-passport")
    assert code == 0 and "quire serve q4km" in out and "quire eval q4km --against pydoc" in out, err
    code, out, err = run("eval", "q4km", "--against", "pydoc", "--limit", "5", "--rounds", "0")
    assert code == 0 and "weights on disk" in out, err
    with serving("q4km") as url, urllib.request.urlopen(f"{url}/v1/models") as reply:
        assert json.load(reply)["data"]
