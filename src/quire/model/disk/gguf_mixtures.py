"""GGUF's architectures of decoders whose layers have experts, and attend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_dense import BIASED_QKV, CLIPPED, QKV, SECTIONS
from quire.model.disk.gguf_names import GATING, MULTIPLIERS, NEXTN, SCORES, SIGMOID, WIDTH, WINDOW
from quire.model.families.names import GGUF_FINAL_NEXTN
from quire.model.families.sparse import FIELDS as BLOCK_FIELDS

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


BLOCKS = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk_blocks": "attention.indexer.top_k",
    "index_block_size": "attention.indexer.block_size",
    "index_local_blocks": "attention.indexer.local_blocks",
}
"""Fields of what chooses the blocks that are attended to."""


def widths_of_minimax_m3(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Widths of MLPs and of experts, and which layers choose blocks."""
    kinds = ("full_attention", "minimax_m3_sparse")
    return {
        "dense_intermediate_size": raw[WIDTH],
        WIDTH: raw["moe_intermediate_size"],
        "shared_intermediate_size": (raw["n_shared_experts"] or 1) * raw["moe_intermediate_size"],
        "layer_types": [kinds[has(f"blk.{i}.indexer.q_proj.")] for i in range(raw["num_hidden_layers"])],
    }


def fields_of_minimax_m3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of config.json; a layer's shared experts are one of several times the width."""
    old, width = raw.get("sparse_attention_config") or {}, raw[WIDTH]
    return {ours: old.get(theirs, raw.get(ours)) for ours, theirs in BLOCK_FIELDS.items()} | {
        WIDTH: raw["dense_intermediate_size"],
        "moe_intermediate_size": width,
        "n_shared_experts": raw["shared_intermediate_size"] // width,
    }


def one_of_hunyuan(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that config.json may have for each layer, the same for all."""
    top = raw.get("moe_topk", 1)
    return {"num_experts_per_tok": top[0] if isinstance(top, list) else top, "moe_intermediate_size": raw[WIDTH]}


def scores_of_cohere2(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """The function by which experts are scored; files that do not say are those written here before, of a softmax."""
    return {"expert_selection_fn": "sigmoid" if raw.get("gating") == SIGMOID else "softmax"}


def gating_of_cohere2(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of the function by which experts are scored, of config.json."""
    return {"gating": SCORES[raw.get("expert_selection_fn", "softmax")]}


MIXTURES: dict[str, Architecture] = {
    "deepseek": Architecture(
        "deepseek", interleaved=True, facts={"norm_topk_prob": False}, spelling=ROUTED, defaults={"num_dense_layers": 0}
    ),
    "bailingmoe": Architecture(
        "bailing_moe", interleaved=True, parted=QKV, spelling=SHARED, required=("head",), score="softmax"
    ),
    "bailingmoe2": Architecture(
        "bailing_moe_v2",
        extra=(NEXTN,),
        fixed={GATING: SIGMOID},
        fields=GROUPS,
        spelling=SHARED,
        required=("head",),
        mtp=GGUF_FINAL_NEXTN,
        also=("bailing_moe",),
        tell=lambda raw: {"shared_expert_intermediate_size": raw["moe_intermediate_size"]},
        score="sigmoid",
    ),
    "dbrx": Architecture(
        "dbrx",
        names={"mlp_norm": "attn_output_norm"},
        fields={
            "attn_config.clip_qkv": "attention.clamp_kqv",
            "ffn_config.moe_num_experts": "expert_count",
            "ffn_config.moe_top_k": "expert_used_count",
        },
        spelling=(("layer_norm_eps", "rms_norm_eps"), ("max_position_embeddings", "max_seq_len")),
        required=("head",),
    ),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", spelling=(("num_experts_per_tok", "moe_topk"),), tell=one_of_hunyuan),
    "minimax-m3": Architecture(
        "minimax_m3_vl_text",
        names={f"block_index_{part}": f"indexer.{part}_proj" for part in "qk"}
        | {f"block_index_{part}_norm": f"indexer.{part}_norm" for part in "qk"},
        fixed={GATING: SIGMOID, "expert_weights_norm": True},
        fields=BLOCKS | {"rotary_dim": "rope.dimension_count"},
        spelling=(("num_dense_layers", "first_k_dense_replace"),),
        required=("head",),
        further=widths_of_minimax_m3,
        tell=fields_of_minimax_m3,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        defaults={"num_dense_layers": 0},
        also=("solar_open",),
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
        fields={"logit_scale": "logit_scale", "gating": GATING},
        spelling=SHARED,
        further=scores_of_cohere2,
        tell=gating_of_cohere2,
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
