"""GGUF's architectures of decoders whose layers have experts, and attend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_dense import BIASED_QKV, CLIPPED, SECTIONS
from quire.model.disk.gguf_names import GATING, MULTIPLIERS, NEXTN, SIGMOID, WINDOW

GROUPS = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}
ROUTED = (("num_experts", "n_routed_experts"), ("num_dense_layers", "first_k_dense_replace"))
SHARED = (("n_shared_experts", "num_shared_experts"), ("num_dense_layers", "first_k_dense_replace"))


def experts_of_hy(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Layers before the first with experts, and how many of these every token takes, by their width."""
    layers, width = raw["num_hidden_layers"], raw["moe_intermediate_size"]
    dense = next((i for i in range(layers) if has(f"blk.{i}.ffn_gate_inp.")), layers)
    return {
        "first_k_dense_replace": dense,
        "num_shared_experts": (raw["shared_expert_intermediate_size"] or 0) // width,
    }


UNNORMED = 128
"""Experts of the size of Llama 4 whose queries and keys have no norms, which no key records."""


def norms_of_llama4(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Norms without weights."""
    return {"use_qk_norm": raw["num_experts"] != UNNORMED}


MIXTURES: dict[str, Architecture] = {
    "glm4moe": Architecture(
        "glm4_moe",
        extra=(NEXTN,),
        names={"mlp_norm": "post_attention_norm"},
        fixed={GATING: SIGMOID},
        fields=GROUPS,
        spelling=ROUTED,
    ),
    "gpt-oss": Architecture("gpt_oss", extra=WINDOW, names={"mlp_norm": "post_attention_norm"}),
    "olmoe": Architecture("olmoe", fields=CLIPPED),
    "dots1": Architecture("dots1", fixed={GATING: SIGMOID}, fields=GROUPS, spelling=ROUTED),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        interleaved=True,
        fields={
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
        spelling=(
            ("num_experts", "moe_num_experts"),
            ("num_experts_per_tok", "moe_k"),
            ("n_shared_experts", "moe_num_shared_experts"),
        ),
        told={"use_bias": BIASED_QKV},
    ),
    "phimoe": Architecture("phimoe", extra=WINDOW[:1], fields={"rms_norm_eps": "attention.layer_norm_rms_epsilon"}),
    "qwen3vlmoe": Architecture(
        "qwen3_moe", extra=(SECTIONS, "n_deepstack_layers"), facts={"norm_topk_prob": True}, read_only=True
    ),
    "afmoe": Architecture(
        "afmoe",
        extra=WINDOW,
        facts={"mup_enabled": True},
        fixed={GATING: SIGMOID},
        spelling=(
            ("n_shared_experts", "num_shared_experts"),
            ("norm_topk_prob", "route_norm"),
            ("routed_scaling_factor", "route_scale"),
        ),
    ),
    "llama4": Architecture(
        "llama4_text",
        interleaved=True,
        fields={
            "interleave_moe_layer_step": "interleave_moe_layer_step",
            "intermediate_size_mlp": "feed_forward_length",
        },
        further=norms_of_llama4,
        tell=lambda raw: {"moe_intermediate_size": raw["intermediate_size"]},
    ),
    "cohere2moe": Architecture(
        "cohere2_moe",
        interleaved=True,
        extra=(*WINDOW, NEXTN),
        fields={"logit_scale": "logit_scale"},
        spelling=SHARED,
    ),
    "granitemoe": Architecture(
        "granitemoe",
        interleaved=True,
        fields=MULTIPLIERS,
        spelling=(("shared_expert_intermediate_size", "shared_intermediate_size"),),
        also=("granitemoeshared",),
    ),
    "exaone-moe": Architecture(
        "exaone_moe", extra=(*WINDOW, NEXTN), fixed={GATING: SIGMOID}, fields=GROUPS, spelling=SHARED
    ),
    "minimax-m2": Architecture("minimax_m2", fixed={GATING: SIGMOID}, fields={"rotary_dim": "rope.dimension_count"}),
    "hy_v3": Architecture(
        "hy_v3",
        extra=(NEXTN,),
        fixed={GATING: SIGMOID},
        spelling=(*SHARED, ("routed_scaling_factor", "router_scaling_factor")),
        naked=("router_bias",),
        further=experts_of_hy,
    ),
    "mellum": Architecture("mellum", extra=WINDOW),
}
