"""benchmarks/compress/tools.py: its table says what was measured, and quire's own process does what its recipe says."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def compressors(monkeypatch: pytest.MonkeyPatch) -> Any:
    return importlib.import_module("benchmarks.compress.tools")


def row(method: str, tool: str, kl: float) -> dict[str, Any]:
    """A row as `Bench.measured` makes it."""
    mib = 1 << 20
    return {"model": "pydoc", "method": method, "tool": tool, "kl": kl, "top1": 0.9, "seconds": 10 * kl, "cpu": 20 * kl,
            "total": 9.0, "peak": 300 * mib, "above": 50 * mib, "bytes": 5 * mib}  # fmt: skip


def test_the_table_sets_ours_beside_theirs(compressors: Any, tmp_path: Path) -> None:
    kept = compressors.Kept(tmp_path / "rows.json")
    kept.add(row("gptq4_g64", "llmcompressor", 9.0))
    kept.add(row("gptq4_g64", "llmcompressor", 0.5))  # measured again
    kept.add(row("gptq4_g64", "quire", 0.25))
    kept.add(row("rtn4", "quire", 1.0))
    kept.add({"model": "pydoc", "method": "rtn4", "tool": "llmcompressor", "failed": "code 1"})
    kept.add(row("rtn4", "quire", 7.0) | {"model": "smollm2"})  # another model's row takes no other's place
    assert [(r["method"], r["tool"]) for r in compressors.Kept(tmp_path / "rows.json").rows] == [
        ("rtn4", "quire"), ("rtn4", "llmcompressor"), ("gptq4_g64", "quire"), ("gptq4_g64", "llmcompressor"),
        ("rtn4", "quire"),
    ]  # fmt: skip
    lines = compressors.table(kept.rows)
    assert lines[2:] == [
        "| pydoc | gptq4_g64 | llmcompressor | 0.25000 / 0.50000 = 0.50 | 2.5 / 5.0 = 0.50 | 5.0 / 10.0 = 0.50 | "
        "300 / 300 = 1.00 | 50 / 50 = 1.00 |",
        "\npydoc, gptq4_g64 beside rtn4: KL 0.25000 / 1.00000 = 0.25, MiB 5.00 / 5.00 = 1.00",
    ]


def test_every_method_is_a_recipe_and_every_tool_has_what_is_asked_of_it(compressors: Any) -> None:
    tool_process = importlib.import_module("benchmarks.compress.tool_process")
    for name, method in compressors.METHODS.items():
        assert compressors.recipe_of(method.recipe(2, 16), name).calibration.samples == 2
        for tool in method.tools:
            assert f'"{name}": ' in inspect.getsource(tool_process.TOOLS[tool]), f"{tool} has no {name}"


@pytest.mark.slow
def test_a_process_of_ours_is_measured(compressors: Any, tmp_path: Path) -> None:
    """One text of the held-out ones, the quickest method."""
    bench = compressors.Bench(tmp_path, 2, 16, tmp_path)
    bench.texts = {"a module": bench.texts["sched"]}
    found = bench.measured("rtn8", "quire")
    assert 0 < found["kl"] < 0.01 and found["top1"] > 0.9, found
    assert 0 < found["seconds"] < found["total"] and found["cpu"] > 0 and 0 < found["above"] < found["peak"]
    assert [len(ids) for ids in json.loads((tmp_path / "rows.json").read_text())] == [16, 16]
