"""GGUF's architecture of attention to the last tokens and to entries of several, and experts that tokens choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from quire.core.errors import ModelError
from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_latent_pools import LIMITS, STREAM_FIELDS
from quire.model.disk.gguf_latents import HYPER, INDEXERS
from quire.model.disk.gguf_names import GATING, WINDOW

SQRT_SOFTPLUS = 4
"""The number of the function by which experts are scored."""
SINGLE, PAIRED = "heavily_compressed_attention", "compressed_sparse_attention"
RATIOS = {"sliding_attention": 0, PAIRED: 4, SINGLE: 128}
"""Tokens of an entry, by the kind of a layer."""


def _made(prefix: str, name: str) -> dict[str, str]:
    parts = {"numbers": "kv", "gates": "gate", "bias": "ape", "norm": "norm"}
    return {f"{prefix}_{role}": f"{name}_{part}" for role, part in parts.items()}


def facts_of_entries(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """The limit of what all layers' activations read, and how many numbers of a head turn."""
    limits = {limit for name in LIMITS for limit in raw.get(name) or ()}
    if len(limits) != 1:
        raise ModelError("swiglu_clamp_exp, swiglu_clamp_shexp: one limit is needed, the same in every layer")
    return {"swiglu_limit": limits.pop(), "layer_types": None, "partial_rotary_factor": None}


def fields_of_entries(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of each layer, of config.json, and what llama.cpp knows no defaults of."""
    layers, limit = raw["num_hidden_layers"], float(raw.get("swiglu_limit", 10.0))
    found: dict[str, Any] = {name: np.full(layers, limit, np.float32) for name in LIMITS}
    streams = {"hc_mult": raw.get("hc_mult", 4), "hc_sinkhorn_iters": raw.get("hc_sinkhorn_iters", 20)}
    kinds, experts = raw["entry_layers"], raw["token_layers"]
    return (
        found
        | streams
        | {
            "hc_eps": float(raw.get("hc_eps", 1e-6)),
            "compress_ratios": np.array([RATIOS[kind] for kind in kinds], np.int32),
            "num_hash_layers": sum(kind == "hash_moe" for kind in experts),
            "compress_rope_theta": float(raw.get("compress_rope_theta", 160000.0)),
        }
    )


ENTRIES: dict[str, Architecture] = {
    "deepseek4": Architecture(
        "deepseek_v4",
        names={
            "entry_q_a": "attn_q_a",
            "entry_q_a_norm": "attn_q_a_norm",
            "entry_q_b": "attn_q_b",
            "entry_k": "attn_kv",
            "entry_k_norm": "attn_kv_a_norm",
            "entry_o_a": "attn_output_a",
            "entry_o": "attn_output_b",
            **_made("entry", "attn_compressor"),
            **_made("paired", "attn_compressor"),
            **_made("entry_index", "indexer_compressor"),
            "entry_index_q": "indexer.attn_q_b",
            "entry_index_weights": "indexer.proj",
            "token_experts": "ffn_gate_tid2eid",
            **{role: name for role, name in HYPER.items() if role.startswith("hyper")},
        },
        extra=("embedding_length_out",),
        fixed={GATING: SQRT_SOFTPLUS},
        spelling=(("num_experts", "n_routed_experts"),),
        fields={
            "q_lora_rank": "attention.q_lora_rank",
            "sliding_window": WINDOW[0],
            "o_groups": "attention.output_group_count",
            "o_lora_rank": "attention.output_lora_rank",
            "qk_rope_head_dim": "rope.dimension_count",
            "compress_rope_theta": "attention.compress_rope_freq_base",
            "num_hash_layers": "hash_layer_count",
            **INDEXERS,
            **STREAM_FIELDS,
        },
        lists={
            "compress_ratios": "attention.compress_ratios",
            "limits": "swiglu_clamp_exp",
            "limits_shared": "swiglu_clamp_shexp",
        },
        further=facts_of_entries,
        tell=fields_of_entries,
    )
}
