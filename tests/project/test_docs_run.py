"""Every code block of the documents runs, is a template for the reader's own files, or says what it needs to run."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx
import pytest

from docs_pages import PAGES, TARGETS, written
from live_server import LiveServer
from oracle import BACKENDS
from paths import ROOT
from quire.core.config import flat_config
from quire.server.server_options import ServerOptions
from real_server import Shared
from stub_engine import StubEngine

NEEDS = {
    "adapter": "a LoRA adapter",
    "container": "a container engine",
    "gpu": "a GPU",
    "hub": "the Hugging Face Hub",
    "install": "an environment to install into",
    "load": "a server that nothing else uses",
    "machines": "several machines",
    "minutes": "minutes of computing",
    "model": "a model of the reader's own",
    "models": "a server of several models",
    "network": "the Python index",
    "tools": "another tool",
}
"""What a line `<!-- needs: NAME -->` above a block may say; such a block is only checked by test_docs.py."""
BLOCK = re.compile(r"(?:^<!-- needs: (\w+) -->\n)?^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
TEMPLATE = re.compile(
    r"\b(?:MODEL|SOURCE|OUT|FILE|FOLDER|TEACHER|ADAPTER|NAME)\b|path/to|owner/|/models/|\w\.(?:jsonl|toml|json|csv)\b"
)
"""A command with one of these names the reader's own model or file; test_docs.py parses it."""
SERVER = "localhost:8000"


class Code(NamedTuple):
    """A code block: where it is, what it needs ("" if nothing), its language and its text."""

    place: str
    needs: str
    language: str
    text: str


def every_block() -> list[Code]:
    found = []
    for path in [ROOT / "README.md", *PAGES]:
        text = written(path)
        for match in BLOCK.finditer(text):
            place = f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}"
            found.append(Code(place, match[1] or "", match[2], match[3]))
    return found


BLOCKS = every_block()


def params(language: str, needs_server: bool | None = None) -> list[Any]:
    """Blocks that run: those without a mark that are no template."""
    shown = [
        code
        for code in BLOCKS
        if code.language == language and not code.needs and (language == "python" or not TEMPLATE.search(code.text))
    ]
    if needs_server is not None:
        shown = [code for code in shown if (SERVER in code.text) == needs_server]
    return [pytest.param(code, id=code.place) for code in shown]


def lines_of(code: Code) -> list[list[str]]:
    """Commands of a shell block as words."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"\s#[^\n']*$", "", code.text, flags=re.MULTILINE))
    lexer = shlex.shlex(joined, posix=True, punctuation_chars="\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) == {"\n"}:
            commands.append([])
        else:
            commands[-1].append(word)
    return [words for words in commands if words]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a server of the embedded model, started without options."""
    if "cpu" not in BACKENDS:
        pytest.skip("quire._native is not built")
    config = flat_config(device="cpu", num_blocks=128)
    server = LiveServer(cast(StubEngine, Shared(config)), ServerOptions(port=0), config)
    server.start()
    yield server.port
    server.stop()


def test_marks_are_known() -> None:
    marks = {match for path in PAGES for match in re.findall(r"<!-- needs: (.*?) -->", path.read_text())}
    assert marks <= set(NEEDS)
    assert all(code.needs == "" or code.needs in NEEDS for code in BLOCKS)


def test_many_blocks_run() -> None:
    assert len(params("sh")) + len(params("python")) >= 20


def test_lines_are_commands() -> None:
    code = Code("", "", "sh", "quire serve  # a comment\ncurl localhost:8000/x \\\n     -d '{\"a\":\n 1}'\n")
    assert lines_of(code) == [["quire", "serve"], ["curl", "localhost:8000/x", "-d", '{"a":\n 1}']]


@pytest.mark.parametrize("code", params("sh", needs_server=True))
def test_requests_are_answered(code: Code, port: int) -> None:
    for words in lines_of(code):
        assert words[0] == "curl", code.text
        url = next(word for word in words if word.startswith(SERVER)).replace(SERVER, f"http://127.0.0.1:{port}")
        headers = dict(words[at + 1].split(": ") for at, word in enumerate(words) if word == "-H")
        data = words[words.index("-d") + 1] if "-d" in words else None
        reply = httpx.request("POST" if data else "GET", url, headers=headers, content=data, timeout=60)
        assert reply.status_code == 200, f"{reply.status_code}: {reply.text}"
        assert "warning" not in reply.headers


@pytest.mark.parametrize("code", params("python"))
def test_programs_run(
    code: Code, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = code.text
    if "127.0.0.1:8000" in text:
        pytest.importorskip("openai")
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{request.getfixturevalue('port')}")
    elif "cpu" not in BACKENDS:
        pytest.skip("quire._native is not built")
    program = tmp_path / "program.py"
    program.write_text(text)
    names = runpy.run_path(str(program))
    if "llm" in names:
        names["llm"].__exit__(None, None, None)
    assert "print" not in text or capsys.readouterr().out.strip()


@pytest.mark.slow
@pytest.mark.parametrize("code", params("sh", needs_server=False))
def test_commands_run(code: Code, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for words in lines_of(code):
        if words[0] == "make":
            assert words[1] in TARGETS
        elif words[:2] == ["quire", "serve"]:
            serves([*words, "--port", "0"], path)
        elif words[0].endswith("python") and "pytest" in words:
            assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
        else:
            assert words[0] in ("quire", "python"), code.text
            run = subprocess.run(words, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True)
            assert run.returncode == 0, run.stderr


def serves(words: list[str], path: str) -> None:
    """Start a server, wait until it says that it serves, and end it."""
    server = subprocess.Popen(words, env={**os.environ, "PATH": path}, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        found = next(filter(None, (re.search(r"serving \S+ on (http://\S+)", line) for line in server.stderr)))
        assert httpx.get(f"{found[1]}/v1/models", timeout=60).status_code == 200
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    assert server.returncode == 0
