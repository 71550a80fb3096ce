"""Imports of source files, by their syntax trees, and the layers that modules are in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from paths import SOURCE
from quire.core.machine import uncollected

SIDES = {"plan": "sched", "run": "run", "edge": "engine"}
"""Sides of a feature -> the package that has their layer. A module of `features/` is named for its side: `plan_*.py`
stands beside the scheduler, `run_*.py` beside what computes steps, `edge_*.py` beside the engine."""
DEEPER = {"features.structured_output.run_grammar_masks": "sample"}
"""Modules of features that lie below their side: the sampler, which is below run/, reads the masks of grammars."""


BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


@cache
def tree(path: Path) -> ast.Module:
    """What the file says, parsed once for all tests."""
    with uncollected(forever=False):  # trees have no cycles, and are looked through again and again as they grow
        return ast.parse(path.read_text())


@cache
def statements(path: Path) -> tuple[ast.stmt, ...]:
    """All statements of a file, those in blocks, functions and classes too: expressions, most of a tree, have none."""
    found, left = [], [*inside(tree(path))]
    while left:
        node = left.pop()
        if isinstance(node, ast.stmt):
            found.append(node)
        left += inside(node)
    return tuple(found)


def inside(node: ast.AST) -> list[ast.AST]:
    """The statements of a node's blocks, and the handlers and cases that have further blocks."""
    return [each for block in BLOCKS for each in getattr(node, block, ())]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in statements(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, node.lineno
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)


def home(module: str) -> str:
    """The package in whose layer a module of ours is. Of a feature it is that of its side; the folder of a feature,
    which says nothing of sides, is as high as the highest."""
    name = module.removeprefix("quire.")
    package, *rest = name.split(".")
    if package != "features":
        return package
    if rest == ["feature"]:
        return SIDES["plan"]
    return DEEPER.get(name) or (SIDES[rest[1].partition("_")[0]] if len(rest) > 1 else SIDES["edge"])


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def give_back() -> None:
    """Forget all trees."""
    tree.cache_clear()
    statements.cache_clear()
