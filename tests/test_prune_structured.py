"""Smaller checkpoints load in transformers and here, and give the logits of what was left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from oracle import backend, logits, relative_error, write
from quire.compress.prune.structured import Made, drop_channels, drop_heads, drop_layers
from quire.core.config import flat_config
from quire.core.errors import ConfigError, ModelError
from quire.model.build import load_model
from test_mixtures import VARIANTS as MIXTURES
from test_model import VARIANTS as DENSE
from test_model import Paged, prompt

TOLERANCE = 1e-5
VARIANTS = DENSE | MIXTURES
QUICK = ("llama", "llama_biases", "llama_tied", "llama_mqa", "qwen3", "gpt2", "gpt_neox", "phi3", "gemma2", "gemma3")
ATTENTION_OUT = ("self_attn.o_proj", "attn.c_proj", "attention.dense", "self_attn.dense", "attn.out_proj",
                 "self_attn.out_proj", "self_attention.dense", "attn.attention.out_proj")  # fmt: skip
MLP_OUT = ("mlp.down_proj", "mlp.c_proj", "mlp.dense_4h_to_h", "mlp.fc2", "fc2", "mlp.fc_out", "ffn.down_proj")


def checkpoint(folder: Path, variant: str, **facts: Any) -> PreTrainedModel:
    family, own = VARIANTS[variant]
    return write(folder, family, **(own | facts))


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    count = model.config.num_hidden_layers
    return list(next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count))


def part(layer: nn.Module, names: Sequence[str]) -> nn.Module:
    known = dict(layer.named_modules())
    return next(known[name] for name in names if name in known)


def silence(matrix: nn.Module, inputs: Sequence[int] | None = None) -> None:
    """Have a matrix read nothing of `inputs`, or, without any, say nothing."""
    weight = matrix.weight
    assert isinstance(weight, Tensor)
    turned = type(matrix).__name__ == "Conv1D"
    with torch.no_grad():
        if inputs is None:
            weight.zero_()
            if isinstance(matrix.bias, Tensor):
                matrix.bias.zero_()
        else:
            (weight if turned else weight.T)[list(inputs)] = 0


def same(oracle: PreTrainedModel, made: Made, folder: Path) -> None:
    """The smaller checkpoint gives, in transformers and here, the logits of the whole `oracle`."""
    folder.mkdir()
    save_file(made[0], folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(made[1]))
    tokens = prompt(19, 1)
    want = logits(oracle, tokens)
    attention = oracle.config._attn_implementation
    small, report = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention, output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert relative_error(logits(small.eval(), tokens), want) <= TOLERANCE
    model = load_model(flat_config(model=str(folder)), backend("reference"))
    (got,) = Paged(model, [tokens]).run([[19]])
    assert relative_error(got, want) <= TOLERANCE


def rewrite(oracle: PreTrainedModel, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    oracle.save_pretrained(folder)
    return read(folder)


def check_layers(variant: str, folder: Path) -> None:
    oracle = checkpoint(folder / "whole", variant, **({"num_layers": 4} if variant == "gpt_neo" else {}))
    layers = layers_of(oracle)
    gone = [1] if len(layers) == 3 else [0, 3]
    for i in gone:
        silence(part(layers[i], ATTENTION_OUT))
        silence(part(layers[i], MLP_OUT))
    made = drop_layers(*rewrite(oracle, folder / "whole"), [i for i in range(len(layers)) if i not in gone])
    same(oracle, made, folder / "small")


def check_channels(variant: str, folder: Path) -> None:
    oracle = checkpoint(folder / "whole", variant)
    keep = []
    for number, layer in enumerate(layers_of(oracle)):
        down = part(layer, MLP_OUT)
        assert isinstance(down.weight, Tensor)
        width = max(down.weight.shape)
        order = torch.randperm(width, generator=torch.Generator().manual_seed(number)).tolist()
        silence(down, order[40:])
        keep.append(sorted(order[:40]))
    same(oracle, drop_channels(*rewrite(oracle, folder / "whole"), keep), folder / "small")


def check_heads(variant: str, folder: Path, kept: Sequence[Sequence[int]]) -> None:
    oracle = checkpoint(folder / "whole", variant)
    layers, keep = layers_of(oracle), []
    for number, layer in enumerate(layers):
        out, heads = part(layer, ATTENTION_OUT), oracle.config.num_attention_heads
        assert isinstance(out.weight, Tensor)
        size, own = out.weight.shape[1] // heads, kept[number % len(kept)]
        silence(out, [h * size + i for h in range(heads) if h not in own for i in range(size)])
        keep.append(own)
    same(oracle, drop_heads(*rewrite(oracle, folder / "whole"), keep), folder / "small")


@pytest.mark.parametrize("variant", QUICK)
def test_a_model_without_layers_that_add_nothing_is_the_same(variant: str, tmp_path: Path) -> None:
    check_layers(variant, tmp_path)


@pytest.mark.parametrize("variant", QUICK)
def test_a_model_without_channels_that_nothing_reads_is_the_same(variant: str, tmp_path: Path) -> None:
    check_channels(variant, tmp_path)


@pytest.mark.parametrize("variant", ["llama", "llama_biases", "qwen3", "phi3", "gemma2", "gemma3", "cohere_qk_norm"])
@pytest.mark.parametrize("kept", [[[0, 1], [2, 3], [0, 1]], [[0, 2], [1, 3], [1, 2]]], ids=["groups", "of_each_group"])
def test_a_model_without_heads_that_nothing_reads_is_the_same(
    variant: str, kept: list[list[int]], tmp_path: Path
) -> None:
    check_heads(variant, tmp_path, kept)
