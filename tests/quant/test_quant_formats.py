"""Checkpoints that other programs quantized: equal numbers after loading, logits, dense parts, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import foreign_weights as foreign
from oracle import BACKENDS, backend, edit_config, logits, relative_error
from over_torch import over_torch
from paged_model import Paged, prompt
from quantized_checkpoints import (
    F16,
    F32,
    FORMATS,
    REFUSED,
    Format,
    compressed,
    gptq,
    load,
    normal,
    scheme_of,
)
from quire.core.errors import ConfigError, ModelError
from quire.model.describe import describe
from quire.quant.base import QWeight
from quire.quant.packed import grouped
from torch_weights import load_torch

RANDOM = np.random.default_rng(0)


every_format = pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.label)


@every_format
def test_the_numbers_are_those_that_were_stored(form: Format) -> None:
    parts, values = form.convert(normal())
    scheme = scheme_of(form.config)
    assert set(scheme.parts) <= set(parts) <= set(scheme.parts) | set(scheme.optional)
    assert scheme.shape({s: tuple(t.shape) for s, t in parts.items()}) == (48, 256)
    weight = load_torch(scheme, parts, torch.float32)
    assert torch.equal(weight.dequantize(), values)
    assert weight.label == form.becomes
    assert (weight.weight.zeros is None) == form.symmetric, "symmetric weights must take the faster kernels"


@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native was not built (no C++ compiler)")
@every_format
def test_they_are_streamed_at_the_bits_of_the_file(form: Format) -> None:
    parts, _ = form.convert(normal(64, 512))
    stored = sum(t.nbytes for name, t in parts.items() if name not in ("g_idx", "weight_shape"))
    packed = load_torch(scheme_of(form.config), parts, torch.float32).pack(over_torch(backend("cpu")))
    assert packed.nbytes <= 1.05 * stored, f"{packed.nbytes / stored:.3f} of the file's bytes"


def round_inputs(oracle: torch.nn.Module, group: int, dense: str) -> None:
    """Round what every quantized projection of transformers' model reads as the kernels do: int8 codes per group."""

    def rounded(module: torch.nn.Module, inputs: tuple[Tensor]) -> Tensor:
        groups = inputs[0].double().unflatten(-1, (-1, group))  # type: ignore[no-untyped-call]
        step = groups.abs().amax(-1, keepdim=True) / 127
        return ((groups / step).round() * step).flatten(-2).float()  # type: ignore[no-any-return]

    for name, module in oracle.named_modules():
        if name.endswith("_proj") and name != dense:
            module.register_forward_pre_hook(rounded)


@pytest.mark.sampled(4)
@every_format
def test_logits_are_those_of_the_dequantized_model(form: Format, tmp_path: Path) -> None:
    """Weights are equal and activations keep 16 bits: what is left is their rounding, 4e-5 per linear layer."""
    down = "model.layers.1.mlp.down_proj"
    oracle = foreign.replace_linears(tmp_path, form.config, form.convert, dense=(f"{down}.weight",))
    texts = [prompt(4, seed) for seed in range(9)]
    for name in BACKENDS:
        model = load(tmp_path, name)
        got = Paged(model, texts).run([[4] * 9])
        assert max(relative_error(g, logits(oracle, t)) for g, t in zip(got, texts, strict=True)) < 2.5e-4
        assert model.report["q+k+v"][0] == form.becomes
        assert model.report["head"][0] == model.report["down"][0] == "f32", "matrices left dense are loaded dense"


@pytest.mark.parametrize("form", [FORMATS[2], FORMATS[4], FORMATS[12]], ids=lambda f: f.label)
def test_activations_of_eight_bits_on_request(form: Format, tmp_path: Path) -> None:
    """With the same rounding in transformers 5e-7 apart; the wider bound: one activation lies between two codes."""
    oracle = foreign.replace_linears(tmp_path, form.config, form.convert)
    texts = [prompt(4, seed) for seed in range(9)]
    exact = [logits(oracle, tokens) for tokens in texts]
    round_inputs(oracle, form.group, "")
    want = [logits(oracle, tokens) for tokens in texts]
    for name in BACKENDS:
        got = Paged(load(tmp_path, name, activations="int8"), texts).run([[4] * 9])
        errors = sorted(relative_error(g, w) for g, w in zip(got, want, strict=True))
        assert errors[6] < 5e-6 and errors[-1] < 0.05
        assert 1e-3 < max(relative_error(g, e) for g, e in zip(got, exact, strict=True)) < 0.1


@pytest.mark.parametrize("form", [FORMATS[1], FORMATS[8], FORMATS[10]], ids=lambda f: f.label)
def test_matrices_that_are_fused_on_disk(form: Format, tmp_path: Path) -> None:
    """Phi-3 keeps q, k, v and gate, up as one matrix each: rows are taken out of codes, scales and zeros."""
    oracle = foreign.replace_linears(tmp_path, form.config, form.convert, family="phi3")
    texts = [prompt(4, seed) for seed in range(9)]
    got = Paged(load(tmp_path, BACKENDS[-1]), texts).run([[4] * 9])
    assert max(relative_error(g, logits(oracle, t)) for g, t in zip(got, texts, strict=True)) < 4e-4


def test_a_zero_of_zero_survives_the_first_gptq_format() -> None:
    """gptqmodel subtracts one from a whole word, with borrow; adding one to each code alone would not undo that."""
    codes = torch.randint(0, 16, (16, 64), generator=torch.Generator().manual_seed(0))
    zeros = torch.tensor([0, 3, 15, 0, 1, 0, 0, 8] * 4).view(16, 2)
    scales = torch.full((16, 2), 0.01, dtype=F16)
    parts = foreign.gptq(4, 32, first=False)(codes, zeros, scales)
    less_one = (parts["qzeros"].long() - 0x11111111) % (1 << 32)
    parts["qzeros"] = torch.where(less_one >= 1 << 31, less_one - (1 << 32), less_one).int()
    weight = load_torch(scheme_of(gptq(4, 32, False, "gptq").config), parts, F32)
    assert torch.equal(weight.dequantize(), foreign.dequantize(codes, zeros, scales))


def test_tensor_strategy_and_unpacked_zeros_of_older_files() -> None:
    config = foreign.compressed_config("int-quantized", num_bits=8, type="int", symmetric=True, strategy="tensor")
    w = torch.randint(-128, 128, (16, 64), dtype=torch.int8)
    for scale in (torch.tensor(0.01), torch.tensor([0.01])):
        got = load_torch(scheme_of(config), {"weight": w, "weight_scale": scale}, F32)
        assert torch.equal(got.dequantize(), w.float() * scale)
    form = compressed("pack-quantized", 4, 32, False, F16)
    codes, zeros, scales = foreign.quantize(normal(), 4, 32, False, F16)
    parts = form.pack(codes, zeros, scales) | {"weight_zero_point": (zeros - 8).to(torch.int8)}
    assert torch.equal(
        load_torch(scheme_of(form.config), parts, F32).dequantize(), foreign.dequantize(codes, zeros, scales)
    )


def test_zeros_of_rows_that_do_not_fill_a_word() -> None:
    form = compressed("pack-quantized", 4, 32, False, F16)
    parts, values = form.convert(normal(43))
    assert parts["weight_zero_point"].shape == (6, 8)
    assert torch.equal(load_torch(scheme_of(form.config), parts, F32).dequantize(), values)


def test_groups_of_other_sizes_are_cut_into_those_of_the_kernels() -> None:
    codes = RANDOM.integers(-8, 8, (3, 448), np.int8)
    scales, zeros = RANDOM.random((3, 2)).astype(np.float16), RANDOM.integers(-8, 8, (3, 2), np.int8)
    weight = grouped(4, codes, scales, zeros, 256)
    assert weight.weight.group == 64
    zero, scale = (t.astype(np.float32).repeat(256, 1)[:, :448] for t in (zeros, scales))
    assert np.array_equal(weight.dequantize(), (codes - zero) * scale)
    for group in (8, 24):
        with pytest.raises(ModelError, match="not cut by 16"):
            grouped(4, codes[:, :96], np.ones((3, 96 // group), np.float16), None, group)
    with pytest.raises(ModelError, match="nan or inf"):
        grouped(4, codes, scales * np.inf, None, 256)


def test_fusing_a_symmetric_with_an_asymmetric_matrix() -> None:
    codes, scales = RANDOM.integers(-8, 8, (4, 64), np.int8), RANDOM.random((4, 2)).astype(np.float16)
    a = grouped(4, codes, scales, None, 32)
    b = grouped(4, codes, scales.astype(np.float32), np.full((4, 2), 3, np.int8), 32)
    assert np.array_equal(QWeight.cat_rows([a, b]).dequantize(), np.concatenate((a.dequantize(), b.dequantize())))


def test_awq_without_zero_points_of_its_own(tmp_path: Path) -> None:
    """gptqmodel writes the middle of the codes as every zero of a symmetric file."""
    form = replace(FORMATS[6], symmetric=True)
    config = form.config | {"zero_point": False}
    parts, values = form.convert(normal(256, 256))
    assert torch.equal(load_torch(scheme_of(config), parts, F32).dequantize(), values)
    oracle = foreign.replace_linears(tmp_path, config, form.convert)
    (got,) = Paged(load(tmp_path, dtype="float32"), [prompt(19, 1)]).run([[19]])
    assert relative_error(got, logits(oracle, prompt(19, 1))) < 1e-3


def test_what_describe_says(tmp_path: Path) -> None:
    form = FORMATS[0]
    oracle = foreign.replace_linears(tmp_path, form.config, form.convert)
    facts = describe(str(tmp_path))
    assert facts.scheme == "gptq int4 g128" and facts.parameters == oracle.num_parameters()
    assert facts.matrix_bits == 4 + 16 / 128
    with pytest.raises(ConfigError, match="quantized already"):
        load(tmp_path, quantization="int4")
    assert load(tmp_path, quantization="gptq").quantization == facts.scheme
    with pytest.raises(ConfigError, match="the model's files are gptq"):
        load(tmp_path, quantization="awq")


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_declarations_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: quantization_config: .*{message}"):
        scheme_of(config)


def cut(name: str) -> Callable[[foreign.Parts], foreign.Parts]:
    return lambda parts: parts | {name: parts[name][:-1].contiguous()}


def scattered(parts: foreign.Parts) -> foreign.Parts:
    return parts | {"g_idx": parts["g_idx"].clamp(max=0).contiguous()}


def without(name: str) -> Callable[[foreign.Parts], foreign.Parts]:
    return lambda parts: {s: t for s, t in parts.items() if s != name}


DAMAGED: list[tuple[Format, Callable[[foreign.Parts], foreign.Parts], str]] = [
    (FORMATS[0], scattered, "q_proj.*g_idx does not give each group its 128 columns"),
    (FORMATS[0], without("scales"), "missing tensors.*proj.scales"),
    (FORMATS[0], cut("scales"), r"scales is float16 \[1, 256\], needs float16 or bfloat16 or float32 \[2, 256\]"),
    (FORMATS[0], cut("qzeros"), "qzeros is int32"),
    (FORMATS[0], cut("qweight"), "asks for"),
    (FORMATS[0], lambda p: p | {"scales": p["scales"] * torch.nan}, "nan or inf"),
    (FORMATS[0], lambda p: p | {"scales": p["scales"].int()}, "needs floating-point"),
    (FORMATS[0], lambda p: p | {"qweight": p["qweight"].long()}, "qweight is int64"),
    (FORMATS[6], cut("qzeros"), "qzeros is int32"),
    (FORMATS[9], without("weight_shape"), "missing tensors.*weight_shape"),
    (FORMATS[9], lambda p: p | {"weight_shape": p["weight_shape"] + 8}, "weight_shape is"),
    (FORMATS[9], lambda p: p | {"weight_packed": p["weight_packed"].long()}, "weight_packed is int64"),
    (FORMATS[10], without("weight_zero_point"), "missing tensors.*weight_zero_point"),
    (FORMATS[10], cut("weight_zero_point"), "weight_zero_point is int32"),
    (FORMATS[13], without("weight_scale"), "needs floating-point"),
    (FORMATS[15], lambda p: p | {"weight": p["weight"] * 0 + 9}, "codes outside -8..7"),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("form", "damage", "message"), DAMAGED)
def test_tensors_that_are_refused(form: Format, damage: Any, message: str, tmp_path: Path) -> None:
    def convert(w: Tensor) -> tuple[foreign.Parts, Tensor]:
        parts, values = form.convert(w)
        return damage(parts), values

    foreign.replace_linears(tmp_path, form.config, convert)
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value) and "model.layers.0" in str(caught.value)


def test_quantized_tensors_without_a_declaration(tmp_path: Path) -> None:
    foreign.replace_linears(tmp_path, FORMATS[0].config, FORMATS[0].convert)
    edit_config(tmp_path, remove=("quantization_config",))
    with pytest.raises(ModelError, match=r"quant_method: is missing, but model.layers.0.*qweight is quantized"):
        load(tmp_path)


def test_unused_tensors_are_refused(tmp_path: Path) -> None:
    form = FORMATS[9]
    foreign.replace_linears(tmp_path, form.config, form.convert)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.q_proj.weight_global_scale": torch.ones(1)}, file)
    with pytest.raises(ModelError, match=r"no role.*weight_global_scale"):
        load(tmp_path)
