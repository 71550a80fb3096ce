"""Figures of benchmarks/compress/format_quality.py, and what a channel 300 times larger costs."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> Any:
    return importlib.import_module("benchmarks.compress.format_quality")


def test_divergence_and_agreement_of_known_distributions(quality: Any) -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).log()
    q = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]).log() + 7  # logits are free up to a constant
    found = quality.compare([p], [q])
    assert found["kl"] == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2, rel=1e-5)
    assert found["top1"] == 0.5


def test_planted_outlier_channel(quality: Any, tmp_path: Path) -> None:
    """Dettmers et al. 2022: one channel of the activations x300, the function unchanged. Rounded to int8 it drowns the
    other channels of its group: the smaller the group, the less is lost; bf16 loses nothing."""
    plain, planted = (small_model(quality, tmp_path / name, plant=name == "planted") for name in ("plain", "planted"))
    windows = quality.random_windows(2, 1000)
    exact = quality.run_quire(plain, {"dtype": "float32"}, windows).logits

    def cost(**options: Any) -> float:
        return float(quality.compare(exact, quality.run_quire(planted, options, windows).logits)["kl"])

    assert cost(dtype="float32") < 1e-6
    assert cost(dtype="bfloat16") < 2e-5
    by_group = [cost(quantization="int8", group_size=group) for group in (32, 64, 128)]
    assert by_group[0] < 0.75 * by_group[1] < 0.6 * by_group[2]
    assert by_group[0] < 0.025


def small_model(quality: Any, folder: Path, plant: bool) -> Path:
    config = quality.SHAPES["tiny"] | {"vocab_size": 1000, "num_hidden_layers": 2, "torch_dtype": "float32"}
    weights = quality.random_weights(config)
    if plant:
        quality.plant(weights)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    save_file(weights, folder / "model.safetensors")
    return folder
