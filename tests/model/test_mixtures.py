"""Models with experts: logits equal transformers' however the tokens are cut; loading; counts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreign_weights import compressed_config
from model_variants import EIGHT, ERNIE
from model_variants import MIXTURES as VARIANTS
from oracle import BACKENDS, backend, edit_config, logits, relative_error, write
from paged_model import CUTS, LONGROPE, TOLERANCE, Paged, assert_left_out, load, prompt
from paged_model import ops as ops
from quire.core.errors import ModelError
from quire.model.describe import describe
from quire.model.load.roles import ROLES
from quire.ops.backend import Ops

__all__ = ["ops"]
MSCALES = {"short_mscale": 1.2, "long_mscale": 1.2}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_however_cut(variant: str, ops: Ops, tmp_path: Path) -> None:
    family, facts = VARIANTS[variant]
    oracle = write(tmp_path, family, **facts)
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    want = [logits(oracle, s) for s in sequences]
    for block_size in (1, 16):
        model = load(tmp_path, ops, block_size=block_size)
        for name, cut in CUTS.items():
            for got, expected in zip(Paged(model, sequences).run(cut), want, strict=True):
                assert relative_error(got, expected) <= TOLERANCE, (block_size, name)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("variant", VARIANTS)
def test_dummy_weights_and_reports_fit(variant: str, tmp_path: Path) -> None:
    family, facts = VARIANTS[variant]
    oracle = write(tmp_path, family, **facts)
    found = describe(str(tmp_path))
    made = describe(str(tmp_path), load_format="dummy")
    biases = sum(t.numel() for n, t in oracle.state_dict().items() if family == "axk1" and "correction" in n)
    assert made.parameters + biases == found.parameters, "files of A.X K1 may have a correction bias, and need not"
    held = oracle.state_dict()
    decays = [name for name in held if family == "minimax" and name.endswith(("_decay", "slope_rate"))]
    assert made.tensors + len(decays) == found.tensors or biases, "what follows from MiniMax's sizes is in files, too"
    assert found.parameters == sum(p.numel() for name, p in held.items() if name not in decays)
    sizes = [ROLES[r].numbers(found.spec) for r in found.roles]
    assert 0.9 * found.parameters <= sum(sizes) <= found.parameters
    routing, sparse = found.spec.moe.routing, sum(found.spec.moe.sparse)
    expert = sum(math.prod(ROLES[r].shape(found.spec)) for r in found.roles if ROLES[r].experts)
    idle = (routing.experts - routing.top_k) * sparse * expert
    biases = found.parameters - found.active_parameters - idle
    assert 0 <= biases <= 0.1 * idle and (biases == 0) == (family != "gpt_oss" or idle == 0)
    model = load(tmp_path, backend("reference"))
    needless = sum(held[name].nbytes for name in decays)
    assert model.weight_bytes - model.report["rope"][1] >= found.bytes_on_disk - needless
    (got,) = Paged(load(tmp_path, backend("reference"), load_format="dummy"), [prompt(9, 1)]).run([[9]])
    assert bool(torch.isfinite(got).all())


@pytest.mark.sampled(3)
@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int4"}])
@pytest.mark.parametrize("variant", ["mixtral", "qwen2_moe", "gpt_oss", "afmoe", "laguna", "mimo_v2_flash"])
def test_native_logits_are_bit_equal_however_cut(variant: str, options: dict[str, Any], tmp_path: Path) -> None:
    family, facts = VARIANTS[variant]
    whole_groups = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    write(tmp_path, family, **facts | {k: v for k, v in whole_groups.items() if k in facts}, dtype=torch.bfloat16)
    model = load(tmp_path, backend("cpu"), **options)
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    want = Paged(model, sequences).run(CUTS["whole"])
    for seed, cut in enumerate(CUTS.values()):
        for got, expected in zip(Paged(model, sequences, seed).run(cut), want, strict=True):
            assert torch.equal(got, expected)
    assert_left_out(Paged(model, [sequences[0][:9]]), want[0][:9], exact=True)


def test_a_bound_of_the_sum_of_weights_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "ernie4_5_moe", **ERNIE, moe_norm_min=1e-2)
    with pytest.raises(ModelError, match="moe_norm_min"):
        describe(str(tmp_path))


def test_the_factor_of_a_long_rope_is_read(tmp_path: Path) -> None:
    oracle = write(tmp_path, "phimoe", **EIGHT, rope_parameters=LONGROPE | MSCALES)
    model = load(tmp_path, backend("reference"), max_model_len=16)
    (got,) = Paged(model, [prompt(16, 1)]).run([[16]])
    assert relative_error(got, logits(oracle, prompt(16, 1))) <= TOLERANCE
    edit_config(tmp_path, rope_parameters=LONGROPE | MSCALES | {"long_mscale": 1.3})
    with pytest.raises(ModelError, match="long_mscale"):
        describe(str(tmp_path))


def test_experts_under_the_names_of_their_modules(tmp_path: Path) -> None:
    """As llm-compressor saves them: dense here, and with the parts of a format beside them in a file of its own."""
    oracle = write(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=4)
    path, names = tmp_path / "model.safetensors", {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    tensors = load_file(path)
    config = compressed_config("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True)
    for quantized in (False, True):
        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            base, _, last = name.removesuffix(".weight").rpartition(".")
            if "experts" not in name:
                found[name] = tensor
                continue
            assert last in names
            new = f"{base}.{names[last]}"
            if not quantized:
                found[f"{new}.weight"] = tensor
                continue
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            found |= {f"{new}.weight": (tensor / scale).round().to(torch.int8), f"{new}.weight_scale": scale}
        save_file(found, path)
        if quantized:
            edit_config(tmp_path, quantization_config=config)
        (got,) = Paged(load(tmp_path, backend("reference")), [prompt(19, 1)]).run([[19]])
        assert relative_error(got, logits(oracle, prompt(19, 1))) <= (0.05 if quantized else TOLERANCE)


def test_quantized_experts_are_near(tmp_path: Path) -> None:
    # Every expert runs: a choice that rounding tips over would be another model's.
    oracle = write(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=4)
    tokens = prompt(19, 1)
    model = load(tmp_path, backend("reference"), quantization="int8")
    assert model.report["expert_gate+expert_up"][0] == "int8 g32" and model.report["router"][0] == "f32"
    (got,) = Paged(model, [tokens]).run([[19]])
    assert relative_error(got, logits(oracle, tokens)) <= 0.05


def test_mxfp4_experts_are_read_as_they_are(ops: Ops, tmp_path: Path) -> None:
    oracle = write(tmp_path, "gpt_oss", **VARIANTS["gpt_oss"][1])
    g, path, numbers = torch.Generator().manual_seed(5), tmp_path / "model.safetensors", [0.0, 0.5, 1, 1.5, 2, 3, 4, 6]
    tensors = load_file(path)
    book = torch.tensor(numbers + [-n for n in numbers])
    for name, p in oracle.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        e, k, n = tensors.pop(name).shape
        blocks = torch.randint(256, (e, n, k // 32, 16), generator=g, dtype=torch.uint8)
        scales = torch.randint(120, 124, (e, n, k // 32), generator=g, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = book[torch.stack((blocks & 15, blocks >> 4), -1).flatten(3).long()] * 2.0 ** (
            scales[..., None] - 127.0
        )
        with torch.no_grad():
            p.copy_(values.flatten(2).transpose(1, 2))
    save_file(tensors, path)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    tokens = prompt(19, 1)
    model = load(tmp_path, ops)
    assert model.report["expert_gate+expert_up"][0].startswith("table4")
    (got,) = Paged(model, [tokens]).run([[19]])
    assert relative_error(got, logits(oracle, tokens)) <= 1e-3
    save_file(tensors | {"model.layers.0.mlp.experts.down_proj_scales": scales[:, :-1].contiguous()}, path)
    with pytest.raises(ModelError, match=r"experts\.0\.down_proj"):
        describe(str(tmp_path))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", **EIGHT)
    edit_config(tmp_path, num_local_experts=9)
    with pytest.raises(ModelError, match=r"experts\.8\.w1\.weight"):
        describe(str(tmp_path))
    edit_config(tmp_path, num_local_experts=7)
    with pytest.raises(ModelError, match=r"gate\.weight is \[8, 64\], the config asks for \[7, 64\]"):
        describe(str(tmp_path))


def test_more_choices_than_experts_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", **EIGHT)
    edit_config(tmp_path, num_experts_per_tok=9)
    with pytest.raises(ModelError, match="num_experts_per_tok"):
        describe(str(tmp_path))
