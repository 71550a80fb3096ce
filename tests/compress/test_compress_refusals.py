"""What a user of `quire compress` may do wrong, and what may go wrong: one line each, and nothing half written."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quire.cli
from oracle import edit_config, write
from quire.compress.tracking.journal import WorkFolder
from tiny_model import write_tiny

Run = Callable[..., tuple[int, list[str]]]
CALIBRATION = ["--set", "calibration.samples=4", "--set", "calibration.length=16"]
SMALL = [*CALIBRATION, "--set", "group_size=32", "--no-passport"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model of three layers with a tokenizer of its own."""
    return tokenized(tmp_path / "in", "llama")


def tokenized(folder: Path, family: str, **facts: Any) -> Path:
    write_tiny(folder)
    write(folder, family, **({"vocab_size": 260, "intermediate_size": 64} | facts))
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs the command: (its exit code, the lines that it wrote to standard error)."""

    def run(*words: object) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["quire", "compress", *map(str, words)])
        monkeypatch.chdir(tmp_path)
        code = 0
        try:
            quire.cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, capsys.readouterr().err.splitlines()

    return run


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


RECIPES = {
    "stage": ('[[stage]]\nkind = "quantise"\nmethod = "rtn"\n', "stage 1: kind: 'quantise' is not one of quantize,"),
    "method": ('[[stage]]\nkind = "quantize"\nmethod = "rnt"\n', "'rnt' is not one of rtn, gptq,"),
    "key": ('[[stage]]\nkind = "quantize"\nmethod = "rtn"\nbit = 4\n', "bit: there is no such key; is it bits?"),
    "table": ('[calibrate]\n[[stage]]\nkind = "quantize"\nmethod = "rtn"\n', "is it calibration?"),
    "toml": ("stage = [", "not TOML"),
    "binary": ("\udcff\udcfe\x00", "not TOML"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str, source: Path, tmp_path: Path, run: Run) -> None:
    text, reason = RECIPES[name]
    (tmp_path / "r.toml").write_bytes(text.encode(errors="surrogateescape"))
    code, said = run(source, "out", "--recipe", "r.toml")
    assert code == 2 and len(said) == 1 and reason in said[0], said
    assert left(tmp_path) == {"in", "r.toml"}


@pytest.mark.parametrize("end", [".txt", ".jsonl"])
def test_calibration_files_of_garbage(end: str, source: Path, tmp_path: Path, run: Run) -> None:
    garbage = tmp_path / f"garbage{end}"
    garbage.write_bytes(bytes(torch.randint(0, 256, (4096,), generator=torch.Generator().manual_seed(0))))
    code, said = run(source, "out", "--quantize", "gptq", *SMALL, "--set", f"calibration.files={garbage}")
    assert code == 2 and len(said) == 1 and f"{garbage}: is not UTF-8 text at byte" in said[0], said
    assert left(tmp_path) == {"in", garbage.name}


def test_a_source_that_is_not_there(tmp_path: Path, run: Run) -> None:
    code, said = run("./nowhere", "out", "--quantize", "rtn", *SMALL)
    assert code == 2 and len(said) == 1 and "nowhere" in said[0], said
    assert left(tmp_path) == set()


METHODS = {
    "quantize": ("awq", "mixed", "gguf"),
    "prune": ("magnitude", "structured"),
}
"""One of those that change a layer's matrices one by one with text and one without, and every other."""
SAME = {"quantize": ("rtn", "gptq", "smoothquant", "llm_int8", "fp8", "nf4", "mxfp4"), "prune": ("wanda", "sparsegpt")}
NAN = [pytest.param(kind, method) for kind in METHODS for method in METHODS[kind]]
NAN += [pytest.param(kind, method, marks=pytest.mark.slow) for kind in SAME for method in SAME[kind]]
OPTIONS = {
    "rtn": ("group_size=32",), "gptq": ("group_size=32",), "awq": ("group_size=32",), "magnitude": ("sparsity=0.5",),
    "wanda": ("sparsity=0.5",), "sparsegpt": ("sparsity=0.5",), "structured": ("layers=1", "score=magnitude"),
    "gguf": ("format=Q8_0",), "mixed": ("bits_per_weight=5", "choices=4,8", "group_size=32", "rounding=rtn"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "method"), NAN)
def test_weights_that_are_nan(kind: str, method: str, source: Path, tmp_path: Path, run: Run) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    sets = [word for option in OPTIONS.get(method, ()) for word in ("--set", option)]
    code, said = run(source, "out", f"--{kind}", method, *sets, *CALIBRATION, "--no-passport")
    assert code == 2 and len(said) == 1 and "nan" in said[0], said
    assert ("layers.1." in said[0] or "blk.1." in said[0]) and left(tmp_path) <= {"in", "out.partial"}, said


def test_a_full_disk(source: Path, tmp_path: Path, run: Run) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        code, said = run(source, "out", "--quantize", "rtn", *SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2 and len(said) == 1 and "File too large" in said[0], said
    assert left(tmp_path) == {"in"}
    code, said = run(source, "out", "--quantize", "rtn", *SMALL)
    assert code == 0 and left(tmp_path) == {"in", "out"}, said


def test_ctrl_c_leaves_what_another_run_goes_on_with(
    source: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, done = WorkFolder.save, list[str]()

    def stopped(work: WorkFolder, stage: int, name: str, *more: Any) -> None:
        save(work, stage, name, *more)
        done.append(name)
        if len(done) == 2:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for what runs behind them
    try:
        with monkeypatch.context() as patched:
            patched.setattr(WorkFolder, "save", stopped)
            code, said = run(source, "out", "--quantize", "rtn", *SMALL)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130 and len(said) <= 1 and left(tmp_path) == {"in", "out.partial"}, said
    code, said = run(source, "out", "--quantize", "rtn", *SMALL)
    assert code == 0 and left(tmp_path) == {"in", "out"}, said


def test_layers_that_read_what_others_made(tmp_path: Path, run: Run) -> None:
    write(tmp_path / "t5", "t5")
    shared = tokenized(tmp_path / "in", "qwen3", num_hidden_layers=4, head_dim=16)
    edit_config(shared, num_kv_shared_layers=2)
    recipe = (
        '[[stage]]\nkind = "quantize"\nmethod = "rtn"\n[[stage]]\nkind = "prune"\nmethod = "wanda"\nsparsity = 0.5\n'
    )
    (tmp_path / "r.toml").write_text(recipe)
    for folder, reason in (("t5", "layer 0 reads what an encoder made"), ("in", "layer 2 reads what layer 1 made")):
        code, said = run(folder, "out", "--recipe", "r.toml")
        assert code == 2 and len(said) == 1 and "stage 2 (prune wanda) runs text through one layer" in said[0], said
        assert reason in said[0] and left(tmp_path) == {"t5", "in", "r.toml"}
    code, said = run("in", "out", "--quantize", "rtn", *SMALL, "--set", "kv=fp8")
    assert code == 2 and "stage 1 (quantize rtn) runs text" in said[0] and "out" not in left(tmp_path), said
    code, said = run("in", "out", "--quantize", "rtn", *SMALL)
    assert code == 0 and left(tmp_path) == {"t5", "in", "out", "r.toml"}, said


@pytest.mark.slow
def test_ctrl_c_in_a_process_of_its_own(source: Path, tmp_path: Path) -> None:
    """As a user stops it: no traceback, and the same command goes on."""
    words = [sys.executable, "-c", "from quire.cli import main; main()", "compress", str(source), "out"]
    words += ["--quantize", "rtn", *SMALL, "--set", "calibration.samples=4000", "--set", "calibration.length=128"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "out.partial").exists() and process.poll() is None:
            signal.sigtimedwait([], 0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said and not (tmp_path / "out").exists()
