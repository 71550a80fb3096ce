"""GGUF's architecture of streams that layers mix, a bounded delta rule, and latent attention to pools of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from quire.core.errors import ModelError
from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_latents import HYPER, INDEXED, INDEXERS, KIMI_LINEAR, KIMI_SHAPES, indexers_of_glm
from quire.model.disk.gguf_names import LATENT_LENGTHS, NEXTN
from quire.model.disk.gguf_windowed import GROUPS

STREAM_FIELDS = {
    "hc_mult": "hyper_connection.count",
    "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
    "hc_eps": "hyper_connection.epsilon",
}
LIMITS = ("limits", "limits_shared")
"""Of the activation of experts, and of those that all tokens take."""


def facts_of_glm5(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """The limit of what all layers' activations read, and the layers with indexers of their own."""
    limits = {limit for name in LIMITS for limit in raw.get(name) or ()}
    if len(limits) != 1:
        raise ModelError("swiglu_clamp_exp, swiglu_clamp_shexp: one limit is needed, the same in every layer")
    bound = raw.get("linear_lower_bound")
    safe = {"linear_attn_config": {"safe_gate": False}} if bound is None else {}
    return {**indexers_of_glm(raw, has), **safe, "swiglu_limit": limits.pop(), "linear_lower_bound": bound}


def fields_of_glm5(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of each layer, of config.json, and what llama.cpp knows no defaults of."""
    layers, limit = raw["num_hidden_layers"], float(raw.get("swiglu_limit", 10.0))
    kinds = raw.get("indexer_types") or ["full"] * layers
    found: dict[str, Any] = {name: np.full(layers, limit, np.float32) for name in LIMITS}
    streams = {"hc_mult": raw.get("hc_mult", 4), "hc_sinkhorn_iters": raw.get("hc_sinkhorn_iters", 20)}
    return found | streams | {"indexed": [kind == "full" for kind in kinds], "hc_eps": float(raw.get("hc_eps", 1e-6))}


LATENT_POOLS: dict[str, Architecture] = {
    "glm5-next": replace(
        KIMI_LINEAR,
        model_type="glm5_next_text",
        names={
            **KIMI_LINEAR.names,
            **INDEXED.names,
            **{role: name for role, name in HYPER.items() if role.startswith(("hyper_attn", "hyper_mlp"))},
            "index_gate": "indexer_compressor_gate",
            "index_bias": "indexer_compressor_ape",
        },
        extra=(*LATENT_LENGTHS, NEXTN),
        facts={},
        turns=False,
        spelling=(
            ("num_dense_layers", "first_k_dense_replace"),
            ("num_attention_heads", "linear_num_heads"),
            ("num_experts", "n_routed_experts"),
        ),
        fields={
            **KIMI_LINEAR.fields,
            **INDEXERS,
            **GROUPS,
            "linear_lower_bound": "kda.gate_lower_bound",
            "index_kpool": "attention.indexer.kpool",
            "index_kpool_always_select_tail": "attention.indexer.kpool_select_tail",
            **STREAM_FIELDS,
        },
        lists={
            "indexed": "attention.indexer.types",
            "limits": "swiglu_clamp_exp",
            "limits_shared": "swiglu_clamp_shexp",
        },
        shapes={**KIMI_SHAPES, "delta_decay": lambda spec: (spec.delta.value_heads,)},
        written={"attention.layer_norm_epsilon": 1e-6},
        further=facts_of_glm5,
        tell=fields_of_glm5,
    )
}
