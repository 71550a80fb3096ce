"""The GPU's kernels compile where there is no GPU: one in every run of the tests, all of them in a slow one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triton_ops import needs_triton

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "compile_kernels.py"


def compiled(folder: Path, *options: str) -> tuple[int, str, list[dict[str, Any]]]:
    """(exit code, what was said, rows) of the script."""
    output = folder / "kernels.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--output", str(output), *options],
        capture_output=True, text=True, check=False, env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    rows = json.loads(output.read_text())["kernels"] if output.exists() else []
    return done.returncode, done.stdout + done.stderr, rows


@needs_triton
@pytest.mark.slow
def test_a_kernel_compiles_for_sm_90(tmp_path: Path) -> None:
    code, said, _ = compiled(tmp_path, "--target", "sm_90", "--only", "swiglu")
    assert code == 0, said
    assert " registers" in said and "0 failed" in said


@needs_triton
@pytest.mark.slow
def test_every_kernel_compiles_for_nvidia_and_does_not_spill(tmp_path: Path) -> None:
    code, said, rows = compiled(tmp_path, "--target", "sm_90", "sm_80")
    assert code == 0, said[-3000:]
    assert len(rows) > 20 and all("registers" in row for row in rows)
