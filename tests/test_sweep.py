"""Recipes that are tried one after the other, and what is drawn of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from quire.cli.app import app
from quire.compress import sweep as sweeping
from quire.compress.passport import read_passport, write_passport
from quire.compress.recipe import Recipe, recipe_of
from quire.compress.sweep import PAGE, PICTURE, sweep
from quire.core.errors import ConfigError
from test_frontier import passport


def recipe(bits: int) -> Recipe:
    return recipe_of({"stage": [{"kind": "quantize", "method": "rtn", "bits": bits, "group_size": 32}]}, "r")


RECIPES = {"four": recipe(4), "eight": recipe(8)}
KL = {"four": 0.1, "eight": 0.001}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was made, by a workbench that only writes passports."""
    names: list[str] = []

    def compress(source: str, out: Path, made: Recipe, tell: Callable[[str], None], **_: object) -> None:
        names.append(out.name)
        if out.name == "broken":
            raise ConfigError("broken: as it was told")
        out.mkdir(parents=True)
        found = passport(KL[out.name], 10 if out.name == "four" else 20)
        write_passport(out, replace(found, digests=found.digests | {"recipe": made.digest}))

    monkeypatch.setattr(sweeping, "compress", compress)
    return names


def test_each_is_made_once_and_all_are_drawn(made: list[str], tmp_path: Path) -> None:
    drawn = sweep("", tmp_path, RECIPES, print)
    assert made == ["four", "eight"] and drawn == [tmp_path / PAGE, tmp_path / PICTURE]
    page = (tmp_path / PAGE).read_text()
    assert all(name in page for name in RECIPES) and (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG")
    sweep("", tmp_path, RECIPES, print)
    assert made == ["four", "eight"]


def test_what_was_known_before_a_failure_is_drawn(made: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="as it was told"):
        sweep("", tmp_path, {"four": RECIPES["four"], "broken": recipe(8)}, print)
    assert "four" in (tmp_path / PAGE).read_text()


def test_a_folder_of_another_recipe_is_no_result(made: list[str], tmp_path: Path) -> None:
    sweep("", tmp_path, RECIPES, print)
    with pytest.raises(ConfigError, match="was not made and measured by recipe four"):
        sweep("", tmp_path, {"four": recipe(3)}, print)


@pytest.mark.slow
def test_the_command_measures_and_draws(tmp_path: Path) -> None:
    for bits in (4, 8):
        lines = '[calibration]\nsamples = 4\n\n[[stage]]\nkind = "quantize"\nmethod = "rtn"\ngroup_size = 32\n'
        (tmp_path / f"b{bits}.toml").write_text(f"{lines}bits = {bits}\n")
    words = ["compress", "pydoc", str(tmp_path / "out")]
    words += [word for bits in (4, 8) for word in ("--frontier", str(tmp_path / f"b{bits}.toml"))]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    four, eight = (read_passport(tmp_path / "out" / name) for name in ("b4", "b8"))
    assert four is not None and eight is not None and four.size_bytes < eight.size_bytes and four.kl > eight.kl
    assert str(tmp_path / "out" / PAGE) in result.output
