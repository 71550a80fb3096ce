"""GGUF's architectures whose attention reads latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from quire.core.errors import ModelError
from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_dense import SECTIONS
from quire.model.disk.gguf_layers import without_heads
from quire.model.disk.gguf_names import (
    GATING,
    LATENT_LENGTHS,
    LOG_MULTIPLIER,
    NEXTN,
    SIGMOID,
    SOFTMAX,
    TEMPERATURE,
    WIDTH,
)
from quire.model.disk.gguf_windowed import GROUPS
from quire.model.mixers.indexed import NEIGHBOURS
from quire.model.mixers.latent import keys_from_latents, values_from_latents
from quire.model.spec import ModelSpec

LATENT_SHAPES: Mapping[str, Callable[[ModelSpec], tuple[int, ...]]] = {
    "k_b": keys_from_latents,
    "v_b": values_from_latents,
}
"""A matrix for each head."""


def taps_of(part: str, spec: ModelSpec) -> tuple[int, ...]:
    """Taps of the channels of queries, keys or values."""
    return 1, spec.delta.values if part == "v" else spec.delta.keys, 1, spec.delta.taps


def dense_of_deepseek2(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Files without experts are those of Youtu; those with a correction bias, whatever they say of scores, of V3."""
    if not raw.get("num_experts"):
        return {"model_type": "youtu"}
    return {"model_type": "deepseek_v3"} if has(".exp_probs_b.") else {}


def widths_of_deepseek2(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of experts that files without any need, too."""
    if raw.get("num_experts"):
        return {}
    return {"moe_intermediate_size": raw[WIDTH], "n_shared_experts": 0, "num_dense_layers": raw["num_hidden_layers"]}


DEEPSEEK2 = Architecture(
    "deepseek_v2",
    extra=(*LATENT_LENGTHS, LOG_MULTIPLIER, GATING, NEXTN),
    spelling=(("num_experts", "n_routed_experts"), ("num_dense_layers", "first_k_dense_replace")),
    fields={
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
    },
    latent=True,
    shapes=LATENT_SHAPES,
    scored={SOFTMAX: "deepseek_v2", SIGMOID: "deepseek_v3"},
    further=dense_of_deepseek2,
    tell=widths_of_deepseek2,
    also=("glm4_moe_lite", "kimi_k2", "youtu"),
)
"""Files without the function are those of DeepSeek-V2, which are older."""
KIMI_SHAPES: Mapping[str, Callable[[ModelSpec], tuple[int, ...]]] = {
    **LATENT_SHAPES,
    "delta_decay": lambda spec: (1, 1, spec.delta.value_heads, 1),
    **{f"delta_conv_{part}": partial(taps_of, part) for part in "qkv"},
}
KIMI_LINEAR = Architecture(
    "kimi_linear",
    extra=LATENT_LENGTHS,
    names={"delta_out": "attn_output"},
    facts={"norm_topk_prob": True},
    fixed={GATING: SIGMOID},
    kinds=without_heads("linear_attention"),
    spelling=(
        ("num_dense_layers", "first_k_dense_replace"),
        ("num_attention_heads", "linear_num_heads"),
        ("max_position_embeddings", "model_max_length"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_shared_experts", "num_shared_experts"),
        ("norm_topk_prob", "moe_renormalize"),
    ),
    fields={
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
        "linear_head_dim": "kda.head_dim",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
    },
    rates=("delta_decay",),
    latent=True,
    shapes=KIMI_SHAPES,
)
INDEXERS = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}
"""Fields of what chooses the tokens that are attended to."""
INDEXED = replace(
    DEEPSEEK2,
    model_type="deepseek_v32",
    names={
        "index_q": "indexer.attn_q_b",
        "index_k": "indexer.attn_k",
        "index_k_norm": "indexer.k_norm",
        "index_weights": "indexer.proj",
    },
    fixed={GATING: SIGMOID},
    fields={**DEEPSEEK2.fields, **INDEXERS},
    scored={},
    further=None,
    tell=None,
    also=(),
)


def indexers_of_glm(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Which layers have an indexer of their own; in files without a list all have."""
    own = raw.get("indexed") or [True] * raw["num_hidden_layers"]
    return {"indexer_types": ["full" if one else "shared" for one in own]}


HYPER = {
    "value_gate": "attn_gate",
    **{f"hyper_{ours}{end}": f"{theirs}{end or '_fn'}" for end in ("", "_base", "_scale")
       for ours, theirs in (("attn", "hc_attn"), ("mlp", "hc_ffn"), ("head", "output_hc"))},
}  # fmt: skip
"""Gates of hyper-connections and of latent attention."""


def limits_of_hy4(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """The limit of what experts' activations read, which is one, and the layers with indexers."""
    limits = set(raw.get("limits") or [])
    if len(limits) != 1:
        raise ModelError("swiglu_clamp_exp: one limit is needed, the same in every layer")
    return {**indexers_of_glm(raw, has), "swiglu_limit": limits.pop()}


def lists_of_hy4(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of each layer, of config.json."""
    layers = raw["num_hidden_layers"]
    kinds = raw.get("indexer_types") or ["full" if i == 0 or i % 4 == 1 else "shared" for i in range(layers)]
    limits = np.full(layers, raw.get("swiglu_limit", 10.0), np.float32)
    return {"indexed": [kind == "full" for kind in kinds], "limits": limits}


def growth_of_mistral4(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """How queries grow with their position, by multiples of the length before the context was extended."""
    scaling, step = raw.get("rope_scaling") or {}, raw.get("temperature_length")
    if step not in (None, scaling.get("original_max_position_embeddings")):
        key = "attention.temperature_length"
        raise ModelError(
            f"{key} is {step!r:.40}, only rope.scaling.original_context_length is supported for this family"
        )
    own = {"llama_4_scaling_beta": raw["temperature"]} if raw.get("temperature") else {}
    return {"rope_scaling": {**scaling, **own}}


def temperatures_of_mistral4(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of what queries grow by, of config.json."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    weight, step = scaling.get("llama_4_scaling_beta"), scaling.get("original_max_position_embeddings")
    return {"temperature": float(weight), "temperature_length": step} if weight else {}


def bounds_of_decays(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The bound of decays, which readers know no default of."""
    return {"kda_safe_gate": raw.get("kda_safe_gate", True), "kda_lower_bound": float(raw.get("kda_lower_bound", -5.0))}


LATENTS: dict[str, Architecture] = {
    "deepseek2": DEEPSEEK2,
    "mistral4": replace(
        DEEPSEEK2,
        model_type="mistral4",
        fields={
            **DEEPSEEK2.fields,
            "temperature": TEMPERATURE,
            "temperature_length": "attention.temperature_length",
        },
        scored={},
        also=(),
        further=growth_of_mistral4,
        tell=temperatures_of_mistral4,
    ),
    "deepseek32": INDEXED,
    "glm-dsa": replace(
        INDEXED,
        model_type="glm_moe_dsa",
        lists={"indexed": "attention.indexer.types"},
        further=indexers_of_glm,
        tell=lambda raw: {"indexed": [kind == "full" for kind in raw.get("indexer_types", ())]},
    ),
    "hy_v4": replace(
        INDEXED,
        model_type="hy_v4",
        names={**INDEXED.names, **HYPER},
        fields={
            **INDEXED.fields,
            "hc_mult": "hyper_connection.count",
            "hc_eps": "hyper_connection.epsilon",
            "hc_magnitude": "hyper_connection.magnitude",
        },
        lists={"indexed": "attention.indexer.types", "limits": "swiglu_clamp_exp"},
        orders=NEIGHBOURS,
        further=limits_of_hy4,
        tell=lists_of_hy4,
    ),
    "kimi-linear": KIMI_LINEAR,
    "bailingmoe3": replace(
        KIMI_LINEAR,
        model_type="bailing_hybrid",
        extra=(*LATENT_LENGTHS, NEXTN, SECTIONS),
        names={"delta_out": "attn_output", "delta_a": "ssm_f_a", "delta_z": "ssm_g_a"},
        facts={},
        spelling=(("num_dense_layers", "first_k_dense_replace"),),
        fields={
            **KIMI_LINEAR.fields,
            **GROUPS,
            "kda_safe_gate": "kda.safe_gate",
            "kda_lower_bound": "kda.gate_lower_bound",
        },
        tell=bounds_of_decays,
        rate_sign=1,
        shapes={**KIMI_SHAPES, "delta_decay": lambda spec: (spec.delta.value_heads, 1)},
    ),
    "minicpm3": Architecture(
        "minicpm3",
        fields={"q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank"},
        latent=True,
        parted={"kv_b": ("kv_b",)},
    ),
}
