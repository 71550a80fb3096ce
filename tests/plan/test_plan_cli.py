"""`quire plan` and `quire serve --plan`: what is shown and written, what is kept to, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from planned_models import LLAMA_7B, SMALL, native, rates, written
from quire.cli import main
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.core.version import VERSION
from quire.engine.local import LocalEngine
from quire.figures.files import read_rows
from quire.figures.metric_definitions import METRICS
from quire.plan.plan_file import check_plan, check_started, plan_of, planned_config, read_plan, write_plan
from quire.plan.planned_load import PlannedLoad, Slo
from quire.plan.predict import Machine, Planner

Answer = tuple[int, str, str]


@pytest.fixture
def quire(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """`quire("plan", ...)` -> (exit code, stdout, stderr)."""

    def call(*words: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["quire", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


def test_a_plan_is_shown_written_and_kept_as_a_row(quire: Callable[..., Answer], tmp_path: Path) -> None:
    model, file, rows = written(tmp_path / "m", LLAMA_7B), tmp_path / "plan.json", tmp_path / "rows.jsonl"
    words = (
        "plan",
        model,
        "--device",
        "a100-40gb",
        "--load",
        "rate=2,input=512,output=128",
        "--slo",
        "ttft=500,itl=50",
    )
    code, out, err = quire(*words, "--price", "1.5", "-o", file, "--rows", rows)
    assert code == 0, err
    for said in ("from config.json alone", "KV cache", "time to first token", "cost of 1 M tokens out", "change first",
                 "datasheet: NVIDIA A100", "--quantization int8"):  # fmt: skip
        assert said in out
    [row] = read_rows(rows)
    assert row.kind == "predicted" and row.machine.name == "a100-40gb" and set(row.metrics) <= set(METRICS)
    code, out, _ = quire(*words, "--json")
    told = json.loads(out)
    assert code == 0 and told["cost"] is None and told["plan"]["quire"] == VERSION
    assert told["plan"]["memory"] == json.loads(file.read_text())["memory"] and "cost of" not in out
    assert read_plan(file).options["max_num_seqs"] == 64


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "a1000"), "not one of this, a100-40gb"),
        (("--device", "h100", "--load", "input=5000"), "longest sequence"),
        (("--device", "h100", "--slo", "ttft=fast"), "is no number"),
        (("--device", "h100", "--price", "-1"), "--price"),
        (("--device", "t4", "--num-blocks", "9999999"), "KV cache of"),
        (("--device", "h100", "-o", "/nowhere/plan.json"), "No such file"),
        (("--device", "h100", "--max-model-len", "999999"), "positions"),
        (("--device", "h100", "--rows", "/dev/null/x"), "/dev/null"),
    ],
)
def test_plans_that_are_refused(
    words: tuple[str, ...], message: str, quire: Callable[..., Answer], tmp_path: Path
) -> None:
    code, out, err = quire("plan", written(tmp_path, LLAMA_7B), *words)
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err


@native
def test_an_engine_keeps_to_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "m", SMALL)
    asked = flat_config(model=folder, device="cpu", max_num_seqs=5, kv_cache_memory_bytes=1 << 20, quantization="int8")
    plan = plan_of(Planner(asked, Machine(None, rates())), PlannedLoad(input=64, output=16), Slo())
    write_plan(plan, tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert read == plan
    config = planned_config(read, flat_config(load_format="dummy"), {"load_format"})
    check_plan(read, config)
    info = LocalEngine(config).info
    check_started(read, info.num_blocks, info.max_model_len)
    assert info.num_blocks * plan.block_bytes == plan.kv_bytes and config.scheduler.max_num_seqs == 5
    with pytest.raises(ConfigError, match="KV blocks are planned, and the engine has"):
        check_started(read, info.num_blocks + 1, info.max_model_len)
    with pytest.raises(ConfigError, match="--max-num-seqs 6: the plan has 5"):
        planned_config(read, flat_config(max_num_seqs=6), {"max_num_seqs"})
    with pytest.raises(ConfigError, match="has another shape or format"):
        other = written(tmp_path / "other", SMALL | {"num_hidden_layers": 2})
        check_plan(read, planned_config(read, flat_config(model=other), {"model"}))
    elsewhere = msgspec.structs.replace(plan, place=msgspec.structs.replace(plan.place, processor="another"))
    with pytest.raises(ConfigError, match="processor another was planned for"):
        check_plan(elsewhere, config)
    elsewhere = msgspec.structs.replace(plan, place=msgspec.structs.replace(plan.place, device="h100"))
    with pytest.raises(ConfigError, match="for the device h100"):
        check_plan(elsewhere, config)
    monkeypatch.setattr("quire.plan.plan_file.available_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="bytes are planned for, and 1,000 are free"):
        check_plan(read, config)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is no plan"), ('{"schema": 1}', "is no plan"), ("[]", "is no plan"), (" " * (2 << 20), "larger than")],
    ids=["cut", "lacking", "list", "huge"],
)
def test_files_that_are_no_plan(content: str, message: str, quire: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(content)
    code, _, err = quire("serve", "--plan", tmp_path / "plan.json")
    assert code == 2 and message in err and "Traceback" not in err


def test_rates_that_are_known_need_no_torch() -> None:
    program = "import sys, quire.bench.calibration; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
