"""benchmarks/gpu/check.py itself: stages that fail, hang or have no time; every measurement runs without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.check import ROOT, SLOWER, STAGES, Check, Stage, table
from triton_ops import needs_triton


def stage(name: str, limit: float, *programs: str) -> Stage:
    return Stage(name, limit, lambda check: [[sys.executable, "-c", program] for program in programs])


@pytest.mark.slow
def test_a_stage_that_fails_or_hangs_does_not_stop_the_next(tmp_path: Path) -> None:
    check = Check(dry=True, output=tmp_path / "found.json", minutes=1)
    check.run(stage("good", 20, "print('{\"rate\": 2.5}'); print('{\"share\": 0.75}')"))
    check.run(stage("bad", 20, "print('{\"rate\": 1}'); raise SystemExit('it broke')"))
    check.run(stage("hangs", 6 / SLOWER, "import time; print('{\"early\": 3}', flush=True); time.sleep(60)"))
    check.run(stage("many", 20, "print('x' * 100000)", "raise SystemExit('one of two')"))
    check.started -= 58
    check.run(stage("late", 20, "pass"))
    found = json.loads((tmp_path / "found.json").read_text())["stages"]
    assert found["good"] | {"seconds": 0} == {"status": "ok", "seconds": 0, "results": {"rate": 2.5, "share": 0.75}}
    assert (found["bad"]["status"], found["bad"]["results"]) == ("failed", {"rate": 1})
    assert "it broke" in found["bad"]["said"]
    assert found["hangs"]["status"] == "stopped after 6 s" and found["hangs"]["results"] == {"early": 3}
    assert found["many"]["status"] == "failed" and "one of two" in found["many"]["said"]
    text = table(check.results)
    assert "not started: no time was left" in text and "2.5" in text and "stopped after 6 s" in text


def test_stages_fit_into_the_time() -> None:
    assert [s.name for s in STAGES][:2] == ["build", "ops"], "correct first, then fast"
    assert all(s.limit <= 150 for s in STAGES)


@needs_triton
@pytest.mark.slow
def test_every_stage_runs_without_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.gpu.check", "--dry", "--minutes", "200", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    stages = json.loads(output.read_text())["stages"]
    assert {name: s["status"] for name, s in stages.items()} == dict.fromkeys(stages, "ok"), done.stdout
    assert stages["1b-bf16"]["results"]["tokens_per_s_at_2"] > 0 and stages["tokens"]["results"]["equal_to_cpu"] == 1
