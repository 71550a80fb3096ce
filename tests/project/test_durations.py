"""`make test-fast`: which functions run within given seconds, and what is recorded of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import durations
from paths import ROOT

RECORD = {"a/test_a.py": {"test_long": 5.0, "test_short": 0.1}, "test_b.py": {"test_middle": 1.0}}


def test_those_that_take_least_are_chosen() -> None:
    assert durations.chosen(RECORD, 1.2) == {("a/test_a.py", "test_short"), ("test_b.py", "test_middle")}
    assert durations.chosen(RECORD, 0.5) == {("a/test_a.py", "test_short")}
    assert durations.chosen(RECORD, 0.0) == durations.chosen({}, 9.0) == set()


def test_a_test_is_known_by_its_file_and_function() -> None:
    assert durations.place("tests/ops/test_ops.py::test_a[x-tests/y::z]") == ("ops/test_ops.py", "test_a")
    assert durations.place("tests/sched/test_x.py::TestMachine::runTest") == ("sched/test_x.py", "TestMachine::runTest")


def test_phases_are_added_and_other_records_stay(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    path.write_text('{"cli/test_cli.py": {"test_old": 2.0}, "gone/test_gone.py": {"test_x": 1.0}}')
    recorder = durations.Recorder(path)
    for case, seconds in (("a", 0.5), ("b", 0.25)):
        recorder.pytest_runtest_logreport(
            pytest.TestReport(
                f"tests/cli/test_cli.py::test_new[{case}]", ("", None, ""), {}, "passed", None, "call", duration=seconds
            )
        )
    recorder.pytest_sessionfinish(None)
    assert durations.read(path) == {"cli/test_cli.py": {"test_new": 0.75, "test_old": 2.0}}


def test_a_file_without_a_chosen_function_is_not_collected() -> None:
    fast = durations.Fast(RECORD, 0.5)
    assert fast.pytest_ignore_collect(ROOT / "tests" / "test_b.py")
    assert not fast.pytest_ignore_collect(ROOT / "tests" / "a" / "test_a.py")
    assert not fast.pytest_ignore_collect(ROOT / "tests" / "a" / "test_new.py"), "a new file runs"


def test_pytest_takes_the_option() -> None:
    """In this process's own copy of pytest there are workers and plugins of others."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--fast", "0", "tests/project/test_bounded_loops.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    recorded = "project/test_bounded_loops.py" in durations.read()
    assert (done.returncode == 5) == recorded
