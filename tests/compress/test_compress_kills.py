"""`quire compress` killed at any moment goes on to the same bytes; the text's stream may lie in a file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from killed_work import CALLS
from net_checks import ALL
from oracle import write
from quire.compress.calibration import hidden_states
from quire.compress.calibration.hidden_states import HiddenStates
from quire.compress.calibration.statistics import InputStatistics
from quire.compress.checkpoint.linear_weights import linear_weights
from quire.compress.checkpoint.net import Net
from quire.compress.pipelines.layerwise import LayerModifier, observe_inputs, per_matrix
from quire.compress.pipelines.recipe_runner import compress
from quire.compress.recipes.parser import Recipe, recipe_of
from quire.model.describe import open_model
from quire.ops.weights import Weight
from tiny_model import write_tiny

STAGES = (
    {"kind": "prune", "method": "wanda", "sparsity": 0.3},
    {"kind": "quantize", "method": "gptq", "group_size": 16},
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with weights, and text.txt beside them."""
    folder = write_tiny(tmp_path_factory.mktemp("model") / "source")
    g = torch.Generator().manual_seed(0)
    infos = open_model(str(folder), "dummy").source.infos
    save_file({n: torch.randn(i.shape, generator=g) * 0.1 for n, i in infos.items()}, folder / "model.safetensors")
    (folder / "text.txt").write_text(Path(__file__).read_text())
    return folder


def recipe(source: Path, *stages: dict[str, Any], **calibration: Any) -> Recipe:
    asked = {"files": [str(source / "text.txt")], "samples": 5, "length": 24} | calibration
    return recipe_of({"calibration": asked, "stage": list(stages)}, "test")


def run(source: Path, out: Path, *stages: dict[str, Any], **calibration: Any) -> dict[str, bytes]:
    """What the files of the result hold."""
    compress(str(source), out, recipe(source, *stages, **calibration), lambda what: None)
    assert [path.name for path in out.parent.iterdir()] == [out.name], "nothing is left beside it"
    return {path.name: path.read_bytes() for path in out.iterdir()}


def moments(monkeypatch: pytest.MonkeyPatch, source: Path, at: Path, kept: Path) -> int:
    """A run in `at`, of which copies are made before each call that changes what is on the disk: what a kill leaves."""
    count = 0

    def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
        def guard(*args: Any, **more: Any) -> Any:
            nonlocal count
            with monkeypatch.context() as inner:
                for name, own in calls.items():
                    inner.setattr(os, name, own)
                shutil.copytree(at, kept / str(count))
            count += 1
            return call(*args, **more)

        return guard

    calls = {name: getattr(os, name) for name in CALLS}
    with monkeypatch.context() as patch:
        for name, call in calls.items():
            patch.setattr(os, name, guarded(call))
        compress(str(source), at / "out", recipe(source, *STAGES), lambda what: None)
    return count


def check_moments(monkeypatch: pytest.MonkeyPatch, source: Path, folder: Path, every: int) -> None:
    for name in ("at", "kept", "whole"):
        (folder / name).mkdir(parents=True)
    wanted = run(source, folder / "whole" / "out", *STAGES)
    count = moments(monkeypatch, source, folder / "at", folder / "kept")
    assert count > 40, "each unit is several writes"
    ended = 0
    for number in range(0, count, every):
        left = folder / "kept" / str(number)
        if not (left / "out.partial" / "journal.jsonl").exists() and (left / "out").exists():  # all was done
            assert {path.name: path.read_bytes() for path in (left / "out").iterdir()} == wanted
            ended += 1
            continue
        for part in left.rglob("*.tmp"):
            os.truncate(part, part.stat().st_size // 2)  # as if it was killed amid a write
        assert run(source, left / "out", *STAGES) == wanted, number
    assert ended <= 2, "the last calls"


@pytest.mark.slow
def test_a_kill_changes_nothing(monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path) -> None:
    check_moments(monkeypatch, source, tmp_path, every=7)


@pytest.mark.slow
def test_a_kill_at_every_moment_changes_nothing(monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path) -> None:
    check_moments(monkeypatch, source, tmp_path, every=1)


@pytest.mark.slow
def test_killed_processes_change_nothing(source: Path, tmp_path: Path) -> None:
    """The command itself, killed three times: as soon as a layer is kept, and in the middle of the next ones."""
    words = [sys.executable, "-m", "quire", "compress", str(source)]
    sets = {"files": source / "text.txt", "samples": 64, "length": 120}
    asked = [w for key, value in sets.items() for w in ("--set", f"calibration.{key}={value}")]
    asked += ["--quantize", "gptq", "--set", "group_size=16", "--no-passport"]
    subprocess.run([*words, str(tmp_path / "whole"), *asked], check=True, timeout=120)
    journal = tmp_path / "cut.partial" / "journal.jsonl"
    for units in range(3):
        with subprocess.Popen([*words, str(tmp_path / "cut"), *asked]) as process:
            while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") <= units):
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
        if process.returncode == 0:
            break
    if not (tmp_path / "cut").exists():
        subprocess.run([*words, str(tmp_path / "cut"), *asked], check=True, timeout=120)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "cut" / path.name).read_bytes(), path.name


def test_the_stream_may_lie_in_a_file(source: Path, tmp_path: Path) -> None:
    for name in ("held", "spilled"):
        (tmp_path / name).mkdir()
    held = run(source, tmp_path / "held" / "out", *STAGES)
    assert run(source, tmp_path / "spilled" / "out", *STAGES, spill=True) == held
    rows = [[1, 2, 3, 4]] * 3
    stream = HiddenStates(Net.open(str(source)), rows, tmp_path)
    assert not list(tmp_path.glob("stream*")), "it has no name, so no kill leaves it"
    if sys.platform == "linux":
        name = f"{tmp_path}/stream (deleted)"
        assert Path(name) in {file.readlink() for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
        assert name not in Path("/proc/self/maps").read_text(), "a mapped file would be memory of the process"
    del stream


LOOKS = ["llama", "opt_350m", "falcon_new", "qwen2_moe", "deepseek_v3"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("variant", LOOKS)
def test_a_layer_is_looked_at_as_far_as_is_wanted(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn's inputs are those of whole passes, which a stop that never comes makes."""
    family, facts = ALL[variant]
    write(tmp_path, family, **facts)
    monkeypatch.setattr(hidden_states, "TOKENS", 12)
    net, g = Net.open(str(tmp_path)), torch.Generator().manual_seed(1)
    stream = HiddenStates(net, torch.randint(0, net.spec.vocab_size, (5, 6), generator=g).tolist())
    change = LayerModifier(per_matrix(lambda w, seen: Weight("f32", w)), ("hessian",))
    for layer in range(2):
        whole: dict[tuple[str, int | None], InputStatistics] = {}

        def see(
            role: str, expert: int | None, x: Tensor, whole: dict[tuple[str, int | None], InputStatistics] = whole
        ) -> None:
            whole.setdefault((role, expert), InputStatistics(x.shape[1], ["hessian"])).add(x)

        stream.observe(net.layer(layer), see, {"never"})
        for matrix in linear_weights(net, layer):
            ((key, seen),) = observe_inputs(net, layer, [matrix], change, stream).items()
            assert seen.inputs.rows == (whole[key].rows if key in whole else 0)
            if key in whole:
                assert torch.equal(seen.inputs.hessian, whole[key].hessian)
        stream.advance(net.layer(layer))
