"""Float8 checkpoints: scales that multiply and scales that divide, per matrix, row and block, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foreign_weights as foreign
from oracle import BACKENDS, logits, relative_error
from paged_model import Paged, prompt
from quantized_checkpoints import BF16, F32, float8, load, normal, scheme_of
from quire.core.errors import ModelError
from quire.quant.registry import DENSE, matrix_scheme
from torch_weights import load_torch


def fp8_config(strategy: str) -> dict[str, Any]:
    return foreign.compressed_config("float-quantized", num_bits=8, type="float", symmetric=True, strategy=strategy)


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FLOATS: list[tuple[dict[str, Any], Callable[[Tensor], tuple[foreign.Parts, Tensor]]]] = []


def float_format(
    config: dict[str, Any], rows: int, columns: int, name: str, shape: tuple[int, ...] | None = None
) -> None:
    def convert(w: Tensor) -> tuple[foreign.Parts, Tensor]:
        codes, scales, values = float8(w, rows, columns)
        return {"weight": codes, name: scales if shape is None else scales.reshape(shape)}, values

    FLOATS.append((config, convert))


def gptqmodel_format(method: str, rows: int, columns: int, quant_method: str = "fp8", **fields: Any) -> None:
    """The name of DeepSeek's scales for their reciprocals, [n], [n / rows, k / columns] or []."""
    config = {"quant_method": quant_method, "bits": 8, "group_size": -1, "format": "float8_e4m3fn",
              "checkpoint_format": "float8_e4m3fn", "weight_scale_method": method,
              "weight_scale_semantics": "inverse"} | fields  # fmt: skip

    def convert(w: Tensor) -> tuple[foreign.Parts, Tensor]:
        codes, scales, values = float8(w, rows, columns)
        shape = {"row": (len(w),), "tensor": (), "block": tuple(scales.shape)}[method]
        return {"weight": codes, "weight_scale_inv": (1 / scales).reshape(shape)}, values

    RECIPROCALS.append((config, convert))


RECIPROCALS: list[tuple[dict[str, Any], Callable[[Tensor], tuple[foreign.Parts, Tensor]]]] = []
gptqmodel_format("row", 1, 1 << 20)
gptqmodel_format("row", 1, 1 << 20, quant_method="gptq")
gptqmodel_format("tensor", 1 << 20, 1 << 20)
gptqmodel_format("block", 128, 128, weight_block_size=[128, 128])
float_format(BLOCKS, 128, 128, "weight_scale_inv")
float_format({"quant_method": "fp8", "activation_scheme": "static"}, 1 << 20, 1 << 20, "weight_scale", ())
float_format({"quant_method": "fbgemm_fp8"}, 1, 1 << 20, "weight_scale")
float_format(fp8_config("channel"), 1, 1 << 20, "weight_scale")
float_format(fp8_config("tensor"), 1 << 20, 1 << 20, "weight_scale", (1,))


@pytest.mark.parametrize(("config", "convert"), FLOATS)
def test_float8_files(config: dict[str, Any], convert: Any, tmp_path: Path) -> None:
    parts, values = convert(normal(200, 300))
    scheme = scheme_of(config)
    assert torch.equal(load_torch(scheme, parts, F32).dequantize(), values)
    assert torch.equal(load_torch(scheme, parts, BF16).weight.codes, values.bfloat16())
    oracle = foreign.replace_linears(tmp_path, config, convert)
    tokens = prompt(19, 1)
    for name in BACKENDS:
        (got,) = Paged(load(tmp_path, name, dtype="float32"), [tokens]).run([[19]])
        assert relative_error(got, logits(oracle, tokens)) < 1e-5
        kept = load(tmp_path, name, dtype="bfloat16")
        assert relative_error(Paged(kept, [tokens]).run([[19]])[0], logits(oracle, tokens)) < 2e-2
        assert kept.report["down"] == ("fp8 g128 a16", 2 * 256 * 384 * (128 + 4) // 128), "codes and f32 scales alone"


@pytest.mark.parametrize(("config", "convert"), RECIPROCALS)
def test_float8_files_whose_scales_divide(config: dict[str, Any], convert: Any, tmp_path: Path) -> None:
    oracle = foreign.replace_linears(tmp_path, config, convert)
    tokens = prompt(19, 1)
    for name in BACKENDS:
        for dtype, bound in (("float32", 1e-5), ("bfloat16", 2e-2)):
            (got,) = Paged(load(tmp_path, name, dtype=dtype), [tokens]).run([[19]])
            assert relative_error(got, logits(oracle, tokens)) < bound


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("weight_scale_inv", 0.0, "not above 0"), ("weight_scale_inv", float("nan"), "weight_scale_inv holds nan or inf"),
     ("weight", float("nan"), "weight holds nan")],
)  # fmt: skip
def test_damaged_float8_numbers_are_named(name: str, value: float, message: str) -> None:
    config, convert = RECIPROCALS[0]
    parts = convert(normal(200, 300))[0]
    parts[name].view(-1)[7] = value
    with pytest.raises(ModelError, match=message):
        load_torch(scheme_of(config), parts, F32)


def test_float8_scales_are_found_by_their_name() -> None:
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    scheme = scheme_of(config, "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale_inv")
    codes, scales, values = float8(normal(), 48, 256)
    assert torch.equal(
        load_torch(scheme, {"weight": codes, "weight_scale_inv": scales[0, 0]}, F32).dequantize(), values
    )


def test_float8_that_is_refused(tmp_path: Path) -> None:
    config, convert = FLOATS[0]
    parts, _ = convert(normal(200, 300))
    with pytest.raises(ModelError, match=r"weight_scale_inv is float32 \[3, 2\], needs \[2, 3\]"):
        load_torch(scheme_of(config), parts | {"weight_scale_inv": parts["weight_scale_inv"].t()}, BF16)
    with pytest.raises(ModelError, match="needs float8_e4m3fn"):
        load_torch(scheme_of(config), parts | {"weight": parts["weight"].bfloat16()}, BF16)
    assert matrix_scheme(scheme_of(config), {"weight": "up.weight"}) is DENSE
    with pytest.raises(ModelError, match="has no scale beside it"):
        load_torch(DENSE, {"weight": parts["weight"]}, BF16)


REFUSED = [
    (BLOCKS | {"fmt": "e5m2"}, "fmt: only e4m3"),
    (RECIPROCALS[0][0] | {"format": "float8_e5m2"}, "format: only e4m3"),
    (RECIPROCALS[0][0] | {"weight_scale_semantics": "direct"}, "weight_scale_semantics: 'direct' is not known"),
    (RECIPROCALS[0][0] | {"dynamic": {"+:.*down.*": {"format": "e5m2"}}}, "dynamic: formats that differ"),
    (BLOCKS | {"weight_block_size": [128]}, "weight_block_size: is .*needs two positive integers"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_declarations_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: quantization_config: .*{message}"):
        scheme_of(config)
