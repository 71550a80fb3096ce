"""What packages say of themselves: version, licences, release notes, what a workflow builds."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import quire
from release_notes import notes, version

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROW = re.compile(r"^\| (?!what \|)([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def test_the_version_stands_in_one_place() -> None:
    assert version() == quire.__version__
    assert "version" in PROJECT["project"]["dynamic"] and "version" not in PROJECT["project"]
    assert PROJECT["tool"]["scikit-build"]["metadata"]["version"]["input"] == "src/quire/core/version.py"


def test_the_notice_names_every_licence_and_its_text() -> None:
    rows = ROW.findall((ROOT / "NOTICE").read_text())
    assert len(rows) >= 3
    texts = {text for *_, text in rows}
    assert texts >= {str(path.relative_to(ROOT)) for path in (ROOT / "licenses").iterdir()}
    assert all((ROOT / text).is_file() for text in texts)
    shipped = {str(path.relative_to(ROOT)) for each in PROJECT["project"]["license-files"] for path in ROOT.glob(each)}
    assert shipped == texts | {"LICENSE", "NOTICE"}
    assert all((ROOT / where).exists() for _, where, *_ in rows if where.startswith("src/"))
    expression = " AND ".join(["Apache-2.0", *sorted({licence for _, _, licence, _ in rows})])
    assert PROJECT["project"]["license"] == expression


def test_texts_of_others_are_noted() -> None:
    """A folder of the package that has a licence of its own is a row of NOTICE."""
    noted = (ROOT / "NOTICE").read_text()
    for path in (ROOT / "src").rglob("*"):
        if re.match(r"licen[cs]e|copying", path.name, re.IGNORECASE):
            assert str(path.relative_to(ROOT)) in noted, path


CHANGELOG = """# Changelog

## Unreleased

### Added
- one

## [0.2.0] - 2026-12-01

### Added
- two

## 0.1.0

### Fixed
- three
"""


@pytest.mark.parametrize(("name", "kept"), [("0.2.0", "### Added\n- two\n"), ("0.1.0", "### Fixed\n- three\n")])
def test_notes_of_a_release_are_its_section(name: str, kept: str) -> None:
    assert notes(CHANGELOG, f"v{name}", name) == kept


@pytest.mark.parametrize(
    ("tag", "source", "why"),
    [
        ("v0.2.0", "0.1.0", "the tag v0.2.0 is not v0.1.0"),
        ("0.1.0", "0.1.0", "the tag 0.1.0 is not v0.1.0"),
        ("v0.3.0", "0.3.0", 'no section "## 0.3.0"'),
        ("v0.2", "0.2", 'no section "## 0.2"'),
    ],
)
def test_a_tag_that_is_no_release_is_refused(tag: str, source: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        notes(CHANGELOG, tag, source)


def test_the_script_ends_with_one_line() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "scripts/release_notes.py", "v99"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1 and not run.stdout and run.stderr.count("\n") == 1 and "v99" in run.stderr


def test_the_workflow_publishes_what_it_built() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    jobs = workflow["jobs"]
    assert workflow[True]["push"]["tags"] == ["v*"], "YAML 1.1 reads `on` as true"
    assert set(jobs["publish"]["needs"]) == {"notes", "wheels", "sdist"}
    assert jobs["publish"]["permissions"]["id-token"] == "write", "Trusted Publishing needs it"
    assert all("id-token" not in job.get("permissions", {}) for name, job in jobs.items() if name != "publish")
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    scripts = {name for run in runs for name in re.findall(r"\S+\.py", run)}
    assert scripts and all((ROOT / name).exists() for name in scripts)
    assert len(jobs["wheels"]["strategy"]["matrix"]["runner"]) == 3


def test_wheels_of_the_workflow_have_all_units() -> None:
    settings = PROJECT["tool"]["cibuildwheel"]
    linux = settings["linux"]["config-settings"]
    assert settings["config-settings"]["cmake.define.QUIRE_UNITS"] == linux["cmake.define.QUIRE_UNITS"] == "all"
    assert linux["cmake.define.QUIRE_STATIC_LIBSTDCXX"] == "ON"
    assert "option(QUIRE_STATIC_LIBSTDCXX" in (ROOT / "CMakeLists.txt").read_text()
    assert settings["build"] == "cp311-*"
