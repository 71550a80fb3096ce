"""What packages say of themselves: version, licences, release notes, what a workflow builds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import quire
from paths import ROOT
from release_notes import notes, version
from wheels import glibc, settings

yaml = pytest.importorskip("yaml")

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


@pytest.mark.parametrize(
    ("wheel", "version"),
    [
        ("quire-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl", (2, 28)),
        ("quire-0.1.0-cp311-abi3-manylinux2014_aarch64.manylinux_2_17_aarch64.whl", (2, 17)),
        ("quire-0.1.0-cp311-abi3-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", (2, 27)),
    ],
)
def test_a_wheel_is_named_by_the_glibc_it_needs(wheel: str, version: tuple[int, int]) -> None:
    assert glibc(wheel) == version
    with pytest.raises(ValueError, match="no manylinux tag"):
        glibc("quire-0.1.0-cp311-abi3-linux_x86_64.whl")


def test_wheels_made_here_are_built_as_the_workflow_builds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    linux = PROJECT["tool"]["cibuildwheel"]["linux"]["config-settings"]
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert linux.items() <= settings("x86_64").items() and "cmake.define.CMAKE_TOOLCHAIN_FILE" not in settings("x86_64")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert Path(settings("aarch64")["cmake.define.CMAKE_TOOLCHAIN_FILE"]).exists()
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SystemExit, match="aarch64-linux-gnu-g\\+\\+ is not installed"):
        settings("aarch64")


def pip_wheel(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What `pip wheel .` does where no compiler is: CMake and Ninja of this environment are all that is found."""
    found = folder / "bin"
    found.mkdir()
    for name in ("cmake", "ninja"):
        (found / name).symlink_to(shutil.which(name) or "")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    options = (*options, f"build-dir={folder / 'build'}")
    return subprocess.run(
        [*command, *(f"--config-settings={option}" for option in options), str(ROOT)],
        env={"PATH": str(found), "HOME": str(folder)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.mark.slow
def test_an_install_without_a_compiler_says_so(tmp_path: Path) -> None:
    run = pip_wheel(tmp_path)
    assert run.returncode and not list(tmp_path.glob("*.whl"))
    text = " ".join((run.stdout + run.stderr).split())
    assert "quire: no C++ compiler was found" in text and "-C cmake.define.QUIRE_NATIVE=OFF" in text


@pytest.mark.slow
def test_an_install_without_native_kernels_needs_no_compiler(tmp_path: Path) -> None:
    run = pip_wheel(tmp_path, "cmake.define.QUIRE_NATIVE=OFF")
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith(".so")] and "quire/cli/app.py" in names
    assert any(name.endswith("licenses/NOTICE") for name in names)
