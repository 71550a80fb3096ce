"""The oldest libraries that pyproject.toml lets in, and the jobs that try these, the newest, and a wheel."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import oldest_dependencies
from paths import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/dependencies.yml").read_text())


@pytest.mark.parametrize(
    ("requirement", "told"),
    [
        ("numpy>=2", "numpy==2"),
        ("uvicorn>=0.54,<0.55", "uvicorn==0.54"),
        ("uvloop>=0.21; sys_platform != 'win32'", "uvloop==0.21; sys_platform != 'win32'"),
    ],
)
def test_the_lower_bound_is_the_constraint(requirement: str, told: str) -> None:
    assert oldest_dependencies.constraint(requirement) == told


def test_what_has_no_lower_bound_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'rich' has no lower bound"):
        oldest_dependencies.constraint("rich")


def test_every_library_has_one_constraint_that_its_bounds_let_in() -> None:
    lines = oldest_dependencies.constraints(PROJECT, list(PROJECT["optional-dependencies"]))
    told = {found.name: found for found in map(Requirement, lines)}
    every = [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]
    assert len(told) == len(lines), "two extras have different bounds for one library"
    for asked in map(Requirement, every):
        (bound,) = told[asked.name].specifier
        assert bound.version in asked.specifier and told[asked.name].marker == asked.marker


def test_the_script_names_an_extra_that_there_is_not() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "scripts/oldest_dependencies.py", "nothing"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1 and "no extra 'nothing'" in run.stderr and run.stderr.count("\n") == 1


def test_jobs_name_what_there_is() -> None:
    runs = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in WORKFLOW["jobs"].items()}
    assert set(runs) == {"oldest", "newest", "wheel"}
    for lines in runs.values():
        text = "\n".join(lines)
        assert "quire doctor && quire demo" in lines and "-m pytest" in text
        for extras in re.findall(r"\[([a-z,]+)\]", text):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
        for path in re.findall(r"\b(?:tests|scripts)/[\w/.]+", text):
            assert (ROOT / path).exists(), path
    oldest = "\n".join(runs["oldest"])
    (named,) = re.findall(r"oldest_dependencies\.py ([a-z ]+) >", oldest)
    (installed,) = re.findall(r'"\.\[([a-z,]+)\]"', oldest)
    assert {*named.split(), "train"} == set(installed.split(",")), "torch's oldest may not be of this Python"
