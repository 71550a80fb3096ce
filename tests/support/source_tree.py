"""Imports of source files, by their syntax trees, and the layers that modules are in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from paths import SOURCE

SIDES = {"plan": "sched", "run": "run", "edge": "engine"}
"""Sides of a feature -> the package that has their layer. A module of `features/` is named for its side: `plan_*.py`
stands beside the scheduler, `run_*.py` beside what computes steps, `edge_*.py` beside the engine."""
DEEPER = {"features.structured_output.run_grammar_masks": "sample"}
"""Modules of features that lie below their side: the sampler, which is below run/, reads the masks of grammars."""


@cache
def tree(path: Path) -> ast.Module:
    """What the file says, parsed once for all tests."""
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(path)):
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
