"""The workbench on models with a recurrent state: what is written is loaded again and served, the rest is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from net_checks import made
from oracle import BACKENDS
from quire import LLM, SamplingParams
from quire.cli.app import app
from quire.compress.checkpoint.net import Net
from quire.core.errors import ModelError
from speculation_methods import write_speaking

native = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
FEW = ("--steps", 6, "--batch", 2, "--length", 48, "--rate", 0.003)
TOKENS = [9, 300, 41, 7, 1200, 33, 5, 78, 2024, 17, 300, 41]
QUANTIZED = [
    ({"kind": "quantize", "method": "rtn", "bits": 8, "group_size": 32}, "auto", 0.15),
    ({"kind": "quantize", "method": "gptq", "group_size": 32}, "auto", 1.0),
    ({"kind": "quantize", "method": "awq", "group_size": 32}, "auto", 1.0),
    ({"kind": "quantize", "method": "smoothquant"}, "auto", 0.15),
    ({"kind": "quantize", "method": "fp8"}, "auto", 0.4),
    ({"kind": "quantize", "method": "nf4"}, "auto", 1.0),
]
"""Stages, layouts, and how far logits go at most: small results of random heads are normed to one, and errors with
them, so that codes of 4 bits go far. Logits that have nothing to do with each other are 1.4 apart."""
PRUNED = [
    {"kind": "prune", "method": "magnitude", "pattern": "2:4"},
    {"kind": "prune", "method": "wanda", "pattern": "2:4"},
    {"kind": "prune", "method": "sparsegpt", "pattern": "2:4"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "intermediate_size": 128}
    return write_speaking(tmp_path_factory.mktemp("hybrid") / "m", "states", **sizes)


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return Net.open(str(folder)).logits(torch.tensor([TOKENS]))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def served(folder: Path) -> list[int]:
    """The tokens that an engine draws greedily, after a prefix hit as without."""
    with LLM(str(folder), dtype="float32", num_blocks=64, tune="off") as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        first, second = (llm.generate([{"prompt_token_ids": TOKENS * 3}], params)[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert not first.num_cached_tokens and second.num_cached_tokens == 32
    return list(first.outputs[0].token_ids)


def greedy(folder: Path) -> list[int]:
    """The same by the workbench, which computes all again for each token."""
    net, tokens = Net.open(str(folder)), TOKENS * 3
    with torch.no_grad():
        for _ in range(8):
            tokens = [*tokens, int(net.logits(torch.tensor([tokens]))[0, -1].argmax())]
    return tokens[-8:]


@native
@pytest.mark.parametrize(("stage", "layout", "most"), QUANTIZED, ids=lambda value: str(value)[:60])
def test_what_is_quantized_is_near_and_served(
    stage: dict[str, object], layout: str, most: float, model: Path, tmp_path: Path
) -> None:
    out = made(tmp_path / "out", stage, layout=layout, source=str(model))
    assert 1e-4 < distance(logits(out), logits(model)) < most
    assert served(out)


@native
@pytest.mark.parametrize("stage", PRUNED, ids=lambda stage: stage["method"])
def test_what_is_pruned_is_served(stage: dict[str, object], model: Path, tmp_path: Path) -> None:
    out = made(tmp_path / "out", stage, source=str(model))
    assert served(out) == greedy(out)


@native
def test_layers_and_channels_are_taken_out(model: Path, tmp_path: Path) -> None:
    asked = {"kind": "prune", "method": "structured", "score": "magnitude", "layers": 1, "channels": 0.25}
    out = made(tmp_path / "out", asked, source=str(model))
    before, after = Net.open(str(model)).spec, Net.open(str(out)).spec
    assert after.layers == before.layers - 1 and len(after.mixers) == after.layers
    assert (before.intermediate, after.intermediate) == (128, 96)
    assert served(out) == greedy(out)


def test_heads_of_some_layers_are_not_taken_out(model: Path, tmp_path: Path) -> None:
    asked = {"kind": "prune", "method": "structured", "score": "magnitude", "heads": 0.5}
    with pytest.raises(ModelError, match="of some layers only, cannot be dropped"):
        made(tmp_path / "out", asked, source=str(model))


@native
@pytest.mark.parametrize("method", ["full", "lora", "qat"])
def test_a_hybrid_is_trained_and_served(method: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    words = ["--data", tmp_path / "text.txt", *FEW, "--method", method]
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["train", str(model), str(out), *map(str, words)])
    assert result.exit_code == 0, result.output
    if method == "lora":
        merged = CliRunner().invoke(app, ["train", str(model), str(tmp_path / "merged"), "--merge", str(out)])
        assert merged.exit_code == 0, merged.output
        out = tmp_path / "merged"
    assert distance(logits(out), logits(model)) > 1e-4, "it learned something"
    assert served(out)


@native
def test_a_hybrid_learns_of_a_hybrid(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    words = ["--data", tmp_path / "text.txt", *FEW, "--method", "full"]
    words += ["--teacher", model, "--loss", "kl", "--hidden", "1"]
    student = made(tmp_path / "student", PRUNED[0], source=str(model))
    result = CliRunner().invoke(app, ["train", str(student), str(tmp_path / "out"), *map(str, words)])
    assert result.exit_code == 0, result.output
    assert served(tmp_path / "out") == greedy(tmp_path / "out")
