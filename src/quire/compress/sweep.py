"""Several recipes for one model, each measured, drawn as a frontier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from quire.compress.frontier import write_frontier
from quire.compress.passport import Passport, read_passport
from quire.compress.pipeline import compress
from quire.compress.recipe import Recipe
from quire.core.errors import ConfigError

PAGE, PICTURE = "frontier.html", "frontier.png"


def sweep(
    source: str, out: Path, recipes: Mapping[str, Recipe], report: Callable[[str], None], *, restart: bool = False
) -> list[Path]:
    """Make `out`/NAME of `source` by each of `recipes` (name -> recipe), with its passport, and draw them all in `out`.

    The drawings that were made: a page, and a PNG where there is matplotlib. They are drawn anew after each recipe, so
    that a run which ends early has shown what it knows. A folder that is there already is of an earlier run: it is not
    made again (`restart`: what was begun and not finished is begun anew). `report` as of `compress`. `ConfigError` where
    a folder was made by another recipe, and for what a recipe cannot do.
    """
    found: dict[str, Passport] = {}
    drawn = [out / PAGE, *([out / PICTURE] if find_spec("matplotlib") else [])]
    for name, recipe in recipes.items():
        made = out / name
        if not made.exists():
            compress(source, made, recipe, report, restart=restart, passport=True)
        passport = read_passport(made)
        if passport is None or passport.digests.get("recipe") != recipe.digest:
            raise ConfigError(f"{made} was not made and measured by recipe {name}; remove it, or take another OUT")
        found[name] = passport
        for path in drawn:
            write_frontier(path, found)
    return drawn
