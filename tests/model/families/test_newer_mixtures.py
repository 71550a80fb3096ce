"""Experts of families that transformers has no code for, and files and fields of others as their release has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from family_tensors import as_bailing, rewrite, write_relative
from mixture_variants import NEWER
from oracle import BACKENDS, backend, edit_config, logits, relative_error, write
from paged_model import CUTS, TOLERANCE, Paged, load, prompt
from quire.core.errors import ModelError
from quire.model.describe import describe
from quire.model.disk.hf_config import HfConfig
from quire.model.families.readers import turned_share
from quire.ops.backend import Ops
from vision_models import make_vision_model

FEW = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}


@pytest.fixture(params=BACKENDS, scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return backend(request.param)


def assert_equal(folder: Path, ops: Ops, want: Callable[[list[int]], Tensor], tolerance: float = TOLERANCE) -> None:
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    model = load(folder, ops)
    for name, cut in CUTS.items():
        for got, tokens in zip(Paged(model, sequences).run(cut), sequences, strict=True):
            assert relative_error(got, want(tokens)) <= tolerance, name


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("bailing_moe_v2", {}),
        ("bailing_moe", {"score_function": "sigmoid"}),
        ("bailing_moe", {"architectures": ["BailingMoeV2ForCausalLM"]}),
    ],
)
def test_ling_2(kind: str, more: dict[str, Any], ops: Ops, tmp_path: Path) -> None:
    facts = FEW | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "head_dim": 16}
    oracle = write(tmp_path, "glm4_moe", **facts, use_qk_norm=True, first_k_dense_replace=1, routed_scaling_factor=2.5)
    rewrite(tmp_path, as_bailing)
    edit_config(
        tmp_path, ("n_routed_experts", "n_shared_experts", "rope_parameters"), model_type=kind, num_experts=8,
        num_shared_experts=2, partial_rotary_factor=0.5, rope_theta=1e4, **{"architectures": ["Other"]} | more,
    )  # fmt: skip
    assert_equal(tmp_path, ops, lambda tokens: logits(oracle, tokens))


def test_a_normed_head_is_refused(tmp_path: Path) -> None:
    write_relative(tmp_path, "bailing_moe")
    edit_config(tmp_path, norm_head=True)
    with pytest.raises(ModelError, match="norm_head"):
        describe(str(tmp_path))


@pytest.mark.parametrize("summed", [False, True])
def test_deepseek_moe(summed: bool, ops: Ops, tmp_path: Path) -> None:
    """Its shared experts have no switch: one of 0, which halves, and twice what they make are the same."""
    oracle = write(
        tmp_path, "qwen2_moe", **FEW, num_experts=6, shared_expert_intermediate_size=80, norm_topk_prob=summed,
        qkv_bias=False, mlp_only_layers=[0],
    )  # fmt: skip
    with torch.no_grad():
        for name, p in oracle.named_parameters():
            if "shared_expert_gate" in name:
                p.zero_()
            elif "shared_expert.down_proj" in name:
                p.mul_(2)
    rewrite(tmp_path, lambda tensors: {
        name.replace("shared_expert", "shared_experts"): tensor
        for name, tensor in tensors.items() if "shared_expert_gate" not in name
    })  # fmt: skip
    edit_config(
        tmp_path, ("num_experts", "num_local_experts", "shared_expert_intermediate_size", "mlp_only_layers"),
        model_type="deepseek", n_routed_experts=6, n_shared_experts=2, first_k_dense_replace=1, moe_layer_freq=1,
    )  # fmt: skip
    assert_equal(tmp_path, ops, lambda tokens: logits(oracle, tokens))
    edit_config(tmp_path, scoring_func="sigmoid")
    with pytest.raises(ModelError, match="scoring_func"):
        describe(str(tmp_path))


def test_the_share_that_turns_by_fields_of_the_release(tmp_path: Path) -> None:
    """MiniMax M2's files give a number of a head's numbers, DBRX's a base beside other facts of attention."""
    for family, fields in (("minimax_m2", {"rope_theta": 5e6, "rotary_dim": 12}), ("dbrx", {})):
        facts = dict(NEWER[family][1])
        if family == "dbrx":
            facts |= {"attn_config": facts["attn_config"] | {"rope_theta": 500.0}}
            facts |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
        oracle = write(tmp_path / family, NEWER[family][0], **facts)
        edit_config(tmp_path / family, ("rope_parameters", "partial_rotary_factor"), **fields)
        assert_equal(tmp_path / family, backend("reference"), lambda tokens, oracle=oracle: logits(oracle, tokens))


RELEASED = {
    "minimax_factors": (
        {"attn_type_list": [0, 0, 1, 0]}
        | {f"layernorm_{part}_alpha": 3.5565588200778455 for part in ("full_attention", "linear_attention", "mlp")}
        | {"layernorm_full_attention_beta": 0.5, "layernorm_linear_attention_beta": 0.7, "layernorm_mlp_beta": 1.3},
        ("layer_types", *(f"{part}_{name}_factor" for part in ("full_attn", "linear_attn", "mlp")
                          for name in ("alpha", "beta"))),
    ),
    "bailing_hybrid": ({"head_dim": 16}, ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim",
                                          "layer_types")),
}  # fmt: skip
"""Fields of config.json as the first files have them, and those that transformers writes in their place."""


@pytest.mark.parametrize("variant", RELEASED)
def test_fields_of_the_release(variant: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, NEWER[variant][0], **NEWER[variant][1])
    fields, removed = RELEASED[variant]
    edit_config(tmp_path, removed, **fields)
    assert_equal(tmp_path, backend("reference"), lambda tokens: logits(oracle, tokens))


def test_part_of_a_head_turns_where_minimax_says_so(tmp_path: Path) -> None:
    write_relative(tmp_path, "minimax_m1")
    edit_config(tmp_path, rotary_dim=8)
    assert describe(str(tmp_path)).spec.rope[1].dim == 8


def test_as_many_numbers_of_a_head_turn_as_the_file_says_whatever_their_share_rounds_to(tmp_path: Path) -> None:
    """30 of 44, and 44 * (30 / 44) is below 30."""
    write(tmp_path, "minimax_m2", **NEWER["minimax_m2"][1] | {"head_dim": 44, "rotary_dim": 30})
    edit_config(tmp_path, ("rope_parameters", "partial_rotary_factor"), rotary_dim=30)
    assert describe(str(tmp_path)).spec.rope[0].dim == 30
    edit_config(tmp_path, rotary_dim=7)
    with pytest.raises(ModelError, match="rotary_dim: is 7, needs an even number up to the head size 44"):
        describe(str(tmp_path))
    share = turned_share("head_dim")
    for size in range(2, 300):
        for turned in range(2, size + 1, 2):
            assert int(size * share(HfConfig({"head_dim": size, "rotary_dim": turned}, "config.json"))) == turned


def test_a_norm_that_nothing_reads_is_left_out(tmp_path: Path) -> None:
    """A.X K1's files have it in dense layers, and no correction bias."""
    oracle = write(tmp_path, "axk1", **NEWER["axk1"][1])
    for name, buffer in oracle.named_buffers():
        if "correction_bias" in name:
            buffer.zero_()
    more = {"model.layers.0.post_mlp_layernorm.weight": torch.full((64,), 7.0)}
    rewrite(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if "correction" not in n} | more)
    assert_equal(tmp_path, backend("reference"), lambda tokens: logits(oracle, tokens))


def test_experts_turned_or_not(tmp_path: Path) -> None:
    """Qwen3-VL's files have matrices of experts turned, those of other tools need not."""
    make_vision_model("qwen3_vl_moe", tmp_path)
    tokens, path = [prompt(9, 1)], tmp_path / "model.safetensors"
    (want,) = Paged(load(tmp_path, backend("reference")), tokens).run([[9]])
    tensors = load_file(path)
    stacked = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(stacked) == 4 and tensors[stacked[0]].shape[0] == 8
    save_file({n: t.mT.contiguous() if n in stacked else t for n, t in tensors.items()}, path)
    (got,) = Paged(load(tmp_path, backend("reference")), tokens).run([[9]])
    assert relative_error(got, want) <= TOLERANCE


@pytest.mark.parametrize(("family", "fields", "reason"), [
    ("aria_text", {"hidden_act": "gelu"}, "hidden_act"),
    ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}, "moe_normalize_expert_weights"),
    ("granitemoe_swa", {"layer_rope_theta": [0, 1.0]}, "layer_rope_theta"),
    ("minimax", {"mlp_alpha_factor": 2.0}, "mlp_alpha_factor"),
    ("minimax", {"postnorm": False}, "postnorm"),
    ("minimax", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
    ("hy_v3", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
])  # fmt: skip
def test_what_is_not_known_is_refused(family: str, fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write(tmp_path, NEWER[family][0], **NEWER[family][1])
    edit_config(tmp_path, **fields)
    with pytest.raises(ModelError, match=reason):
        describe(str(tmp_path))


def test_rows_that_experts_do_not_part_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "dbrx", **NEWER["dbrx"][1])
    name = "transformer.blocks.0.ffn.experts.mlp.w1"
    rewrite(tmp_path, lambda tensors: tensors | {name: tensors[name][:-1]})
    with pytest.raises(ModelError, match=r"w1 has 383 rows, which are not parted by 6 experts"):
        describe(str(tmp_path))
