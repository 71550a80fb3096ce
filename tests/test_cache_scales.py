"""Scales of keys and values as a stage: the largest that text shows, where readers look for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from oracle import backend, write
from quire.compress.pipeline import compress, text_of
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.model.build import load_model
from quire.model.describe import open_model
from test_compress import made, recipe
from test_compress_refusals import tokenized
from test_model import Paged, prompt
from test_net import ALL
from test_speculation import PYDOC

KV: dict[str, object] = {"kind": "quantize", "method": "kv"}
RTN: dict[str, object] = {"kind": "quantize", "method": "rtn", "group_size": 32}
LARGEST = {"fp8": 448.0, "int8": 127.0}


def served(folder: str, **options: Any) -> Tensor:
    """The logits of the engine's definitions."""
    tokens = prompt(24, 3)
    model = load_model(flat_config(model=folder, dtype="float32", **options), backend("reference"))
    (rows,) = Paged(model, [tokens]).step([len(tokens)])
    return rows


@pytest.mark.parametrize("form", ["fp8", "int8"])
def test_scales_are_of_the_largest_that_transformers_keeps(form: str, tmp_path: Path) -> None:
    out = made(tmp_path / "out", KV | {"format": form})
    tensors, source = load_file(out / "model.safetensors"), load_file(Path(PYDOC) / "model.safetensors")
    rows = torch.tensor(text_of(Path(PYDOC), recipe(KV)).tokens)
    model = AutoModelForCausalLM.from_pretrained(PYDOC, dtype=torch.float32)
    with torch.no_grad():
        kept = model(rows, use_cache=True).past_key_values
    for i, layer in enumerate(kept.layers):
        for name, seen in (("k_scale", layer.keys), ("v_scale", layer.values)):
            scale = tensors.pop(f"model.layers.{i}.self_attn.{name}")
            assert scale.shape == (1,) and float(scale) == pytest.approx(float(seen.abs().max()) / LARGEST[form], 1e-4)
    assert tensors.keys() == source.keys() and all(torch.equal(t, source[name]) for name, t in tensors.items())
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors" and said["kv_cache_scheme"]["num_bits"] == 8
    assert said["kv_cache_scheme"]["type"] == {"fp8": "float", "int8": "int"}[form]


def test_what_is_served_says_how_its_keys_and_values_are_kept(tmp_path: Path) -> None:
    """The caches here scale every token and head by itself: numbers are those of the source in a cache of that type."""
    out = str(made(tmp_path / "out", KV))
    assert any("--kv-cache-dtype fp8" in note for note in open_model(out).notes)
    assert torch.equal(served(out, kv_cache_dtype="fp8"), served(PYDOC, kv_cache_dtype="fp8"))
    assert not torch.equal(served(out), served(out, kv_cache_dtype="fp8"))


def test_matrices_stay_as_the_stage_before_made_them(tmp_path: Path) -> None:
    source = str(tokenized(tmp_path / "in", "llama"))
    rounded = made(tmp_path / "rounded", RTN, layout="compressed-tensors", source=source)
    out = made(tmp_path / "out", RTN, KV, source=source)
    tensors = load_file(out / "model.safetensors")
    before = load_file(rounded / "model.safetensors")
    assert all(torch.equal(tensors[name], before[name]) for name in before) and len(tensors) == len(before) + 2 * 3
    again = made(tmp_path / "again", KV, source=str(out))
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    gptq = made(tmp_path / "gptq", {"kind": "quantize", "method": "gptq", "group_size": 32}, KV, source=source)
    said = json.loads((gptq / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors" and said["config_groups"] and said["kv_cache_scheme"]
    assert open_model(str(gptq)).scheme.name == open_model(str(out)).scheme.name


@pytest.mark.parametrize(
    ("stages", "layout", "reason"),
    [
        ([KV, RTN], "auto", r"stage 1 \(quantize kv\): no stage can follow it"),
        ([RTN, KV], "gptq", "files of gptq have no place for scales of keys and values"),
        ([{"kind": "quantize", "method": "nf4"}, KV], "auto", "files of nf4 have no place"),
    ],
)
def test_recipes_that_cannot_be(stages: list[dict[str, object]], layout: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        recipe(*stages, layout=layout)


def test_models_that_cannot_have_them(tmp_path: Path) -> None:
    def refused(folder: str, reason: str) -> None:
        with pytest.raises(ConfigError, match=reason):
            compress(folder, tmp_path / "out", recipe(KV), lambda what: None)
        assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()

    for family, reason in (("gpt2", "has its attention in transformer.h.0.attn"), ("deepseek_v2", "keeps latents")):
        folder = tmp_path / family
        write(folder, family, **ALL[family][1] | {"vocab_size": 4096})
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((Path(PYDOC) / name).read_bytes())
        refused(str(folder), reason)
    source = str(tokenized(tmp_path / "in", "llama"))
    refused(str(made(tmp_path / "gptq", RTN, layout="gptq", source=source)), "files of gptq have no place")
