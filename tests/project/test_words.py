"""Names and docstrings that can be read alone: no banned names, no class name for many things, a lint of docstrings."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from paths import ROOT, SOURCE
from quire.core.machine import uncollected
from source_tree import give_back, statements, tree

BANNED_MODULES = {
    "adapting", "ahead", "around", "away", "begun", "borrowed", "busy",  "confined", "door", "described",
    "extended", "gathered", "guiding", "held", "kept", "led", "mail", "meanings", "meeting", "opened", "pictures",
    "reach", "refused", "said", "spoken", "spread", "stretching", "tiering", "told", "toll", "trial", "turns",
    "waiting_room", "whole", "works",
}  # fmt: skip
"""Names of modules and folders that say nothing to who looks for what they do."""
BANNED_CLASSES = {
    "Adapting", "Ahead", "Asked", "Away", "Beside", "Between", "Busy", "Changed", "Cut", "Elsewhere", "Ended", "Far",
    "Guiding", "Hearer", "Held", "HostStep", "Kept", "LedExecutor", "Leaving", "Lost", "Made", "Mortal", "Mutual",
    "Opened", "Patience", "Pictured", "Readying", "Recall", "Said", "Saying", "Sight", "Spilled", "Spread", "Stacked",
    "Teller", "Tiering", "Toll", "Wanted", "WaitingRoom", "Way",
}  # fmt: skip
STILL = {"model/spec.py Sight"}
"""Its text is part of the keys of packed weights and of KV stores on disk."""
MIRRORED = (
    ("ops", "ops/reference", "ops/cpu", "ops/triton"),
    ("quant", "compress/quantize", "compress/layouts"),
    ("model/net", "model/load"),
    ("server/apis/anthropic", "server/apis/llama_cpp", "server/apis/ollama", "server/apis/openai", "server/apis/tgi"),
)
"""Folders that have one thing under one name: for each device, for a format as it is read, made and written, for a part
of a network and its loading, for each API."""
MOST_MODULES = 2
"""Modules of one name, where those of mirrored folders are one."""
PICTURES = {
    "bench/replay.py": "a key of result files",
    "cli/plan.py": "a key of plan files",
    "compress/evaluation/frontier.py": "a chart",
    "compress/pipelines/recipe_runner.py": "a chart",
    "core/request.py": "a key of recordings",
    "engine/client.py": "keys of recordings and result files",
    "plan/predict.py": "a key of plan files",
}
"""Modules that may say "picture", and of what: an image of a prompt is an image everywhere else."""
MOST_CLASSES = 2
"""Classes of one name. A name that begins with an underscore is its module's own, and not counted."""
FORMATS = {"Awq", "Gptq"}
"""A format read, written, a method and its options have the format's name."""
LEANING = {
    "as", "like", "those", "it", "its", "they", "them", "their", "this", "that", "these", "he", "she", "his", "her",
    "both", "neither", "of", "so", "also", "and", "but", "or", "in", "with", "without", "such", "beside", "behind",
    "likewise", "too", "here", "there", "him", "to", "for", "from", "by", "on", "at", "not", "because", "since",
}  # fmt: skip
"""First words of docstrings that cannot be read alone: they lean on a name or a sentence that is elsewhere."""
LEANING_PAIRS = {"the same", "the other", "the others", "one of", "what it", "what its", "all of", "some of"}


@cache
def sources() -> dict[str, Path]:
    paths = sorted(path for path in SOURCE.rglob("*.py") if "assets" not in path.parts)
    return {str(path.relative_to(SOURCE)): path for path in paths}


@pytest.fixture(scope="module", autouse=True)
def trees_are_given_back() -> Iterator[None]:
    with uncollected(forever=False):
        yield
    give_back()


def classes() -> Iterator[tuple[str, str]]:
    for name, path in sources().items():
        yield from ((name, node.name) for node in statements(path) if isinstance(node, ast.ClassDef))


def test_no_module_has_a_name_that_nobody_looks_for() -> None:
    assert not [name for name in sources() if BANNED_MODULES & set(name.removesuffix(".py").split("/"))]


def test_no_class_has_a_name_that_nobody_looks_for() -> None:
    found = [f"{name} {each}" for name, each in classes() if each in BANNED_CLASSES]
    assert not (set(found) - STILL), found


def test_one_module_name_is_one_thing() -> None:
    """A list of files, which an editor opens by name, says which one is looked for."""
    group = {folder: mirrored[0] for mirrored in MIRRORED for folder in mirrored}
    where = defaultdict(set)
    for name in sources():
        folder, _, base = name.rpartition("/")
        if base != "__init__.py":
            where[base].add(group.get(folder, folder))
    many = {base: sorted(folders) for base, folders in where.items() if len(folders) > MOST_MODULES}
    assert not many, many


def test_an_image_is_called_an_image() -> None:
    found = {name for name, path in sources().items() if "picture" in path.read_text().lower()}
    assert found == PICTURES.keys()


def test_one_name_is_one_thing() -> None:
    where = defaultdict(list)
    for name, each in classes():
        if each[0] != "_":
            where[each].append(name)
    many = {each: names for each, names in where.items() if len(names) > MOST_CLASSES and each not in FORMATS}
    assert not many


def leans(docstring: str) -> bool:
    """Whether the first words of a docstring lean on something that is not in it."""
    first = re.match(r"([a-z']+)(?: ([a-z']+))?", docstring.lower().strip())
    return first is not None and (first[1] in LEANING or f"{first[1]} {first[2]}" in LEANING_PAIRS)


def test_docstrings_can_be_read_alone() -> None:
    found = []
    for name, path in sources().items():
        for node in (tree(path), *statements(path)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and leans(text):
                    found.append(f"{name}: {text.splitlines()[0]}")
    assert not found, found


@pytest.mark.parametrize(
    ("docstring", "wrong"),
    [
        ("As `Comm` says.", True),
        ("The same at once.", True),
        ("It is written.", True),
        ("Of one step.", True),
        ("Seconds of one step.", False),
        ("Whether it is there.", False),
        ("Implement `Comm`.", False),
    ],
)
def test_the_lint_of_docstrings(docstring: str, wrong: bool) -> None:
    assert leans(docstring) is wrong


def test_every_page_of_design_is_named_by_a_module() -> None:
    named = {
        page
        for path in sources().values()
        for page in re.findall(r"See docs/design/([\w-]+)\.md", ast.get_docstring(tree(path)) or "")
    }
    assert named == {path.stem for path in (ROOT / "docs" / "design").glob("*.md")}


def test_the_map_is_two_pages() -> None:
    assert (ROOT / "ARCHITECTURE.md").stat().st_size <= 10_000
