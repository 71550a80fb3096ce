"""scripts/set_up.py: which steps, in which order, what is done again, what failures say; nothing is installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

import set_up
from paths import ROOT
from set_up import Setting, Step, missing, plan

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(autouse=True)
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty clone."""
    monkeypatch.setattr(set_up, "ROOT", tmp_path)
    monkeypatch.setattr(set_up, "BIN", tmp_path / ".venv" / "bin")
    for name in ("constraints.txt", "pyproject.toml", "CMakeLists.txt", "src/quire/core/version.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "csrc").mkdir()
    (tmp_path / ".venv").mkdir()
    return tmp_path


def say(name: str, code: str) -> Step:
    return Step(name, [sys.executable, "-c", code])


def run(*lanes: list[Step]) -> Setting:
    """Run lanes beside each other, as `set_up` does."""
    setting = Setting({}, [step.name for lane in lanes for step in lane], total=sum(map(len, lanes)))
    threads = [threading.Thread(target=setting.run, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return setting


def test_a_demo_builds_one_unit_and_takes_what_tests_have_built(clone: Path) -> None:
    (demo,), (tested,) = plan("demo", PROJECT).lanes[0], plan("dev", PROJECT).lanes[0]
    assert "QUIRE_UNITS=native " in " ".join(demo.command) and "QUIRE_UNITS=native;portable" in " ".join(tested.command)
    assert missing(plan("demo", PROJECT), {"native kernels": {"digest": tested.digest()}}).lanes[0] == []
    assert missing(plan("dev", PROJECT), {"native kernels": {"digest": demo.digest()}}).lanes[0] == [tested]


@pytest.mark.parametrize("what", ["demo", "dev", "test"])
def test_torch_comes_alone_and_before_what_needs_it(what: str) -> None:
    names = [step.name for step in plan(what, PROJECT).lanes[1]]
    libraries = ["libraries", "libraries of development"]
    assert names == {"demo": libraries[:1], "dev": ["torch", *libraries], "test": ["torch", *libraries, "triton"]}[what]
    torch = [step for step in plan(what, PROJECT).lanes[1] if step.name == "torch"]
    assert all(re.findall(r"^[a-z]\S*$", " ".join(step.command[-1:])) == ["torch"] for step in torch)


def test_a_demo_needs_no_library_of_development() -> None:
    wanted = " ".join(word for lane in plan("demo", PROJECT).lanes for step in lane for word in step.command[1:])
    assert all(name not in wanted for name in ("torch", "pytest", "ruff", "mypy", "transformers"))
    assert "tokenizers" in wanted


def test_pip_compiles_no_modules_and_keeps_to_the_constraints() -> None:
    steps = plan("test", PROJECT)
    commands = [step.command for lane in (steps.first[1:], *steps.lanes) for step in lane]
    assert all("--no-compile" in command and "constraints.txt" in command for command in commands)


def test_a_step_is_done_again_when_what_it_is_made_of_changes(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (clone / ".venv/bin").mkdir()
    (clone / ".venv/bin/pip").touch()
    everything = plan("test", PROJECT)
    steps = [*everything.first, *(step for lane in everything.lanes for step in lane)]
    done: dict[str, dict[str, Any]] = {step.name: {"digest": step.digest()} for step in steps}

    def again() -> list[str]:
        left = missing(plan("test", PROJECT), done)
        return [step.name for step in (*left.first, *(step for lane in left.lanes for step in lane))]

    assert again() == []
    (clone / "csrc/kernel.h").write_text("int one;")
    assert again() == ["native kernels"], "a header"
    (clone / "csrc/kernel.h").unlink()
    (clone / "src/quire/new.py").write_text("a = 1")
    assert again() == ["native kernels"], "a module's name"
    (clone / "src/quire/new.py").unlink()
    (clone / "src/quire/core/version.py").write_text("VERSION = '2'")
    assert again() == ["native kernels"]
    (clone / "src/quire/core/version.py").write_text("")
    monkeypatch.setenv("QUIRE_UNITS", "all")
    assert again() == ["native kernels"], "other units"
    monkeypatch.delenv("QUIRE_UNITS")
    (clone / "constraints.txt").write_text("torch==3")
    assert set(again()) == {step.name for step in steps[1:]} - {"native kernels"}
    (clone / ".venv/bin/pip").unlink()
    assert again()[0] == "environment"


def test_steps_of_a_lane_follow_and_lanes_run_side_by_side(clone: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each of two lanes waits for a file of the other."""
    wait = "import pathlib, time\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.01)\n"
    left, right = clone / "left", clone / "right"
    setting = run(
        [say("a", "print('noise')"), say("b", f"open({str(left)!r}, 'w')\n" + wait.format(str(right)))],
        [say("c", wait.format(str(left)) + f"open({str(right)!r}, 'w')")],
    )
    assert not setting.failed and next(iter(setting.done)) == "a" and set(setting.done) == {"a", "b", "c"}
    out = capfd.readouterr().out.splitlines()
    assert len(out) == 3 and re.fullmatch(r"1 of 3: a, [\d.]+ s; left: b, c", out[0])
    assert re.fullmatch(r"3 of 3: [bc], [\d.]+ s", out[2])
    assert set(json.loads((clone / ".venv/set-up.json").read_text())) == {"a", "b", "c"}


def test_a_failure_shows_all_and_ends_the_other_lane(clone: Path, capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    setting = run(
        [say("bad", "import sys; print('out of'); print('luck', file=sys.stderr); sys.exit(3)"), say("later", "")],
        [say("long", "import time; time.sleep(250)")],
    )
    assert time.monotonic() - began < 200
    assert "out of" in setting.failed and "luck" in setting.failed and "bad failed (exit code 3)" in setting.failed
    assert not setting.done and capfd.readouterr().out == ""


def test_without_a_compiler_nothing_is_downloaded(clone: Path, tmp_path: Path) -> None:
    """One line, before the environment is made."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import set_up, pathlib; "
        f"set_up.ROOT = pathlib.Path({str(clone)!r}); set_up.BIN = set_up.ROOT / 'none/bin'; set_up.main()"
    )
    (clone / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    command = [sys.executable, "-c", code, "demo"]
    done = subprocess.run(command, env={"PATH": str(tmp_path / "empty")}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == set_up.NO_COMPILER + "\n" and not (clone / "none").exists()


def test_what_may_be_set_up() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/set_up.py", "all"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and done.stderr == "set_up.py: name one of demo, dev, test\n"
