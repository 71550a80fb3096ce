"""What `quantization_config` says of each matrix fits the tensors that are written, for every method and layout."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from net_checks import made
from oracle import write
from quire.compress.checkpoint.net import Net
from quire.compress.layouts.compressed_tensors import CompressedTensorsLayout
from quire.compress.quantize.fp8 import per_block
from quire.compress.recipes.stages import METHODS
from quire.ops.weights import Weight

Shape = tuple[int, ...]
SHORT = {"targets": ["*layers.0.*"]}
STAGES: dict[str, tuple[dict[str, Any], ...]] = {
    "fp8": ({"method": "fp8"},),
    "fp8 static": ({"method": "fp8", "scales": "static"},),
    "fp8 block": ({"method": "fp8", "scales": "block"},),
    "fp8 and cache": ({"method": "fp8", "kv": "fp8"},),
    "int4": ({"method": "rtn", "bits": 4, "group_size": 32},),
    "int4 rows": ({"method": "rtn", "bits": 4, "group_size": -1},),
    "int4 zeros": ({"method": "rtn", "bits": 4, "group_size": 32, "symmetric": False},),
    "int3": ({"method": "rtn", "bits": 3, "group_size": 64},),
    "int8": ({"method": "rtn", "bits": 8, "group_size": 64},),
    "int8 rows": ({"method": "rtn", "bits": 8, "group_size": -1},),
    "gptq": ({"method": "gptq", "group_size": 64},),
    "awq": ({"method": "awq", "group_size": 64},),
    "w8a8": ({"method": "smoothquant"},),
    "mxfp4": ({"method": "mxfp4"},),
    "mixed": ({"method": "mixed", "bits_per_weight": 4.5, "choices": [4, 8], "group_size": 32, "rounding": "rtn"},),
    "2:4": ({"kind": "prune", "method": "magnitude", "pattern": "2:4"}, {"method": "gptq", "group_size": 64}),
}
"""Case -> its stages, quantize where no kind is named. llm_int8 and nf4 have layouts without such groups, gguf none."""
NUMBERS = {"int-quantized": torch.int8, "float-quantized": torch.float8_e4m3fn}


def scheme_of(config: Mapping[str, Any], base: str) -> Mapping[str, Any] | None:
    """What the config says of a linear layer: names go before kinds of layers, `ignore` before both."""
    if base in config["ignore"]:
        return None
    groups = config["config_groups"].values()
    named = [group for group in groups if base in group["targets"]]
    return (named or [group for group in groups if "Linear" in group["targets"]])[0]


def scales_shape(args: Mapping[str, Any], n: int, k: int) -> list[Shape]:
    """Shapes of the scales as compressed-tensors makes parameters of them."""
    match args["strategy"]:
        case "tensor":
            return [(1,)]
        case "channel":
            return [(n, 1)]
        case "group":
            return [(n, k // args["group_size"])]
        case "block":
            rows, columns = args["block_structure"]
            return [(math.ceil(n / rows), math.ceil(k / columns))]
    raise AssertionError(args["strategy"])


def check(tensors: Mapping[str, Tensor], base: str, scheme: Mapping[str, Any] | None, n: int, k: int) -> None:
    """The tensors of one linear layer [n, k] are those that its scheme promises, and no others."""
    mine = {name.removeprefix(f"{base}."): tensor for name, tensor in tensors.items() if name.startswith(f"{base}.")}
    if scheme is None:
        assert set(mine) <= {"weight", "bias"} and mine["weight"].is_floating_point()
        return
    args, inputs, form = scheme["weights"], scheme["input_activations"], scheme["format"]
    expected = {"weight_scale"} | ({"weight"} if form in NUMBERS else {"weight_packed"})
    if form == "pack-quantized":
        expected.add("weight_shape")
        assert mine["weight_shape"].tolist() == [n, k]
        assert mine["weight_packed"].shape == (n, math.ceil(k * args["num_bits"] / 32))
    if not args["symmetric"]:
        expected.add("weight_zero_point")
    if inputs and not inputs["dynamic"]:
        expected.add("input_scale")
        assert mine["input_scale"].shape == (1,) and inputs["strategy"] == "tensor"
    assert set(mine) - {"bias"} == expected
    assert tuple(mine["weight_scale"].shape) in scales_shape(args, n, k), (base, args, mine["weight_scale"].shape)
    if form in NUMBERS:
        assert mine["weight"].shape == (n, k) and mine["weight"].dtype is NUMBERS[form]
        assert args["type"] == ("float" if form == "float-quantized" else "int")
    if inputs and inputs["dynamic"]:
        assert inputs["strategy"] == ("group" if args["strategy"] == "block" else "token")


SLOW = ("mixed", "2:4", "awq", "fp8 and cache")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in STAGES])
def test_a_config_says_what_its_tensors_are(case: str, tmp_path: Path) -> None:
    stages = [{"kind": "quantize", **SHORT, **stage} for stage in STAGES[case]]
    if case == "mixed":
        stages[0].pop("targets")
    folder = made(tmp_path / "out", *stages, layout="compressed-tensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    net = Net.open("")
    linears = {name.removesuffix(".weight") for name in net.tensors if "_proj" in name and name.endswith(".weight")}
    quantized = 0
    for base in linears:
        scheme = scheme_of(config, base)
        quantized += scheme is not None
        check(tensors, base, scheme, *net.tensors[f"{base}.weight"].shape)
    assert quantized == (len(linears) if case == "mixed" else 7)


def test_a_config_says_of_a_stage_in_the_model_what_a_weight_alone_says(tmp_path: Path) -> None:
    """Blocks of several rows, and zeros of a pattern, are seen in all rows of a matrix alone."""
    torch.manual_seed(1)
    weight = per_block(torch.randn(256, 256))
    group = CompressedTensorsLayout().config({"x": weight})["config_groups"]["group_0"]["weights"]
    assert (group["strategy"], group["block_structure"]) == ("block", [128, 128])
    write(tmp_path / "in", "llama", hidden_size=256, intermediate_size=256, head_dim=64)
    stage = {"kind": "quantize", "method": "fp8", "scales": "block", "ignore": []}
    folder = made(tmp_path / "out", stage, source=str(tmp_path / "in"))
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        base = name.removesuffix(".weight")
        check(tensors, base, scheme_of(config, base), *tensors[name].shape)


def test_zeros_are_counted_in_whole_matrices() -> None:
    numbers = torch.ones(64, 64)
    numbers.view(-1, 4)[:, ::2] = 0
    numbers[0] = 1  # a row that breaks the pattern
    sparse, broken = numbers.clone(), numbers
    sparse[0] = numbers[1]
    layout = CompressedTensorsLayout(sparsity="sparse-24-bitmask")
    said = layout.config({"a": Weight("f32", sparse), "b": Weight("f32", broken)})["sparsity_config"]
    assert said["ignore"] == ["b"] and 0.49 < said["global_sparsity"] < 0.5


def test_every_method_of_quantizing_is_tried() -> None:
    tried = {stage["method"] for stages in STAGES.values() for stage in stages} - {"magnitude"}
    assert tried == set(METHODS["quantize"]) - {"llm_int8", "nf4", "gguf"}
