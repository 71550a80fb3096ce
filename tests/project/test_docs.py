"""What the documents tell people to type, to send and to look for exists."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import pytest

from command_line import parse
from docs_pages import PAGES, TARGETS, written
from messages import DIFFERS, texts
from paths import CSRC, ROOT, SOURCE
from quire.cli.app import app
from quire.cli.serve import with_config
from quire.server.apis.openai.protocol import ChatCompletionRequest
from quire.server.apis.unsupported import UNBUILT
from quire.server.openapi import help_of
from quire.server.routes import TABLE

DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "training/README.md")]
FENCED = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SAID = list(texts())
OTHERS_FLAGS = {"--include-dashboard", "--cpus", "--help", "--tune"}
"""Flags of other programs."""
PARTS = (
    "**What it is.**",
    "**When to use it.**",
    "**Measured.**",
    "**How to turn it on.**",
    "**Limits.**",
    "**Paper.**",
)
HEADS = ("index.md", "parallel-pairs.md")
"""Pages of techniques that describe none."""


class Block(NamedTuple):
    """Code of a page and its language; "sh" where it is indented, as in older pages."""

    language: str
    text: str


def names(paths: list[Path]) -> list[Any]:
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths if path.exists()]


def blocks(text: str) -> Iterator[Block]:
    yield from (Block(*found) for found in FENCED.findall(text))
    indented = re.findall(r"(?:^    .*\n)+", FENCED.sub("", text), re.MULTILINE)
    yield from (Block("sh", re.sub(r"^    ", "", found, flags=re.MULTILINE)) for found in indented)


def typed(text: str) -> Iterator[list[str]]:
    """Words of each line of a shell that calls quire, as the shell would give them."""
    for block in blocks(text):
        if block.language in ("sh", "bash"):
            for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
                if line.strip().startswith("quire "):
                    yield shlex.split(line, comments=True)[1:]
    yield from (
        shlex.split(found)[1:]
        for found in re.findall(r"(?<!`)`(quire [a-z-]+ [^`…]*)`(?!`)", text)
        if "..." not in found
    )


@pytest.mark.parametrize("path", names(DOCUMENTS + PAGES))
def test_what_is_typed_exists(path: Path) -> None:
    text = written(path)
    for words in typed(text):
        parse(words)
    for target in re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE):
        assert target in TARGETS, f"make {target}"
    for module in re.findall(r"python -m (benchmarks[\w.]*\w)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
    for script in re.findall(r"python (\S+\.py)", text):
        assert (ROOT / script.removeprefix("./")).exists() or "NAME" in script, script


def test_there_is_something_to_type() -> None:
    assert sum(1 for path in PAGES for _ in typed(path.read_text())) > 60


@pytest.mark.parametrize("path", names(DOCUMENTS))
def test_links_of_documents_lead_somewhere(path: Path) -> None:
    """Those of pages are followed by `make docs`."""
    for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / link).exists(), link


@pytest.mark.parametrize("path", names(PAGES))
def test_flags_files_and_code_exist(path: Path) -> None:
    text = written(path)
    known = {flag for command in every_command(app) for flag in flags_of(command)}
    for flag in re.findall(r"`(--[a-z][a-z0-9_-]+)[ =`]", without_other_tools(text)):
        assert flag in known | OTHERS_FLAGS, f"no command has {flag}"
    for name in re.findall(r"`((?:src|tests|benchmarks|csrc|docs|deploy|examples)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    for block in blocks(text):
        if block.language == "python":
            compile(block.text, str(path), "exec")
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)


def without_other_tools(text: str) -> str:
    """The page without the columns of tables that list commands and flags of other tools beside a column "quire"."""
    lines, kept = [], None
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("|") else []
        if cells and kept is None:
            kept = {at for at, cell in enumerate(cells) if cell in ("quire", "notes") or "quire" not in cells}
        elif not cells:
            kept = None
        lines.append(
            " ".join(cell for at, cell in enumerate(cells) if at in kept) if cells and kept is not None else line
        )
    return "\n".join(lines)


def test_columns_of_other_tools_are_left_out() -> None:
    table = "| vLLM | quire | notes |\n|---|---|---|\n| `--theirs` | `--ours` | `--ours-too` |"
    text = f"{table}\n\n`--text`\n| a |\n|---|\n| `--plain` |"
    assert re.findall(r"--[a-z-]*[a-z]", without_other_tools(text)) == ["--ours", "--ours-too", "--text", "--plain"]


def every_command(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from every_command(found)


def flags_of(command: click.Command) -> set[str]:
    return {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}


def test_bodies_of_requests_are_bodies() -> None:
    """What pages send with curl is what the route reads, no field more."""
    sent = 0
    for path in PAGES:
        for route, data in re.findall(r"curl \S*localhost:8000(/\S+)[^\n]*\\\n\s*-d '([^']*)'", path.read_text()):
            (kind,) = TABLE.at(route)[0].body
            msgspec.json.decode(data, type=kind)
            sent += 1
    assert sent >= 5


def test_every_field_of_bodies_has_a_meaning() -> None:
    kinds = {kind for route in TABLE.routes for kind in route.body}
    for kind in kinds:
        assert list(help_of(kind)) == list(kind.__struct_fields__) and all(help_of(kind).values())
    assert help_of(ChatCompletionRequest)["echo"] == f"Refused: {UNBUILT['echo'][1]}."


@pytest.mark.parametrize("path", names([p for p in PAGES if p.parent.name == "techniques" and p.name not in HEADS]))
def test_every_technique_says_all(path: Path) -> None:
    sections = re.split(r"^## ", path.read_text(), flags=re.MULTILINE)[1:]
    assert sections
    for section in sections:
        found = [section.find(part) for part in PARTS]
        assert -1 not in found and found == sorted(found), section.partition("\n")[0]


def test_quoted_messages_are_in_the_sources() -> None:
    page = (ROOT / "docs" / "operate" / "troubleshooting.md").read_text()
    quoted = [
        found for found in re.findall(r"^\| `([^`]+(?:`[^`|]+`[^`|]*)*)` \|", page, re.MULTILINE) if len(found) > 10
    ]
    assert len(quoted) > 45
    for text in quoted:
        wanted = re.compile(".*".join(map(re.escape, text.split(DIFFERS))), re.DOTALL)
        assert any(wanted.search(each) for each in SAID), f"nobody says: {text}"


def test_a_message_that_nobody_says_is_noticed() -> None:
    assert not any("the moon is made of" in text for text in SAID)


def test_files_of_flags_are_read(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "serve" / "index.md").read_text()
    (block,) = (block.text for block in blocks(page) if block.language == "toml")
    file = tmp_path / "quire.toml"
    file.write_text(block)
    assert with_config(str(file), {})["max_model_len"] == 8192


FILE = re.compile(r"`([\w.-]+/[\w./-]*\.(?:py|h|cpp|inc|cmake|toml|sh|js))`")
"""A file with its folder in the text of a page: of the repository, of the package or of csrc/."""


@pytest.mark.parametrize("path", names(DOCUMENTS + PAGES))
def test_files_that_are_named_exist(path: Path) -> None:
    homes = ROOT, SOURCE, CSRC
    named = set(FILE.findall(FENCED.sub("", written(path))))
    assert not [name for name in named if not any((home / name).exists() for home in homes)]
