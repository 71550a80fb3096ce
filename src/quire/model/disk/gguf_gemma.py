"""GGUF's architecture of Gemma 4, whose keys have a number for each layer or kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_names import KV_HEADS, WIDTH, WINDOW
from quire.model.disk.renamed_tensors import Rewrite

SLIDING, FULL = "sliding_attention", "full_attention"
STILL = 1e20
"""What divides the frequencies of pairs that do not turn, at least."""


def each(value: Any, layers: int) -> list[Any]:
    """A number for each layer, of a list or one for all."""
    return value if isinstance(value, list) else [value] * layers


def sizes_of_gemma4(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Heads and widths of both kinds of layers, and the share of a head that turns where a layer sees everything."""
    kinds, layers = raw["layer_types"], raw["num_hidden_layers"]
    heads, widths = each(raw[KV_HEADS], layers), each(raw[WIDTH], layers)
    of_kind = {kind: next((i for i, one in enumerate(kinds) if one == kind), 0) for kind in (SLIDING, FULL)}
    given = raw.get("rope_parameters") or {}
    factors = (raw.get("rope_scaling") or given.get(FULL) or {}).get("short_factor") or [1.0]
    whole = {
        "rope_type": "proportional",
        "rope_theta": raw["rope_theta"],
        "partial_rotary_factor": sum(factor < STILL for factor in factors) / len(factors),
    }
    local = {"rope_type": "default", "rope_theta": raw.get("rope_local_base_freq") or 1e4}
    return {
        KV_HEADS: heads[of_kind[SLIDING]],
        "num_global_key_value_heads": heads[of_kind[FULL]],
        WIDTH: min(widths),
        "use_double_wide_mlp": max(widths) > min(widths),
        "head_dim": raw["head_dim_swa"] or raw["head_dim"],
        "global_head_dim": raw["head_dim"],
        "attention_k_eq_v": not has(f"blk.{of_kind[FULL]}.attn_v.") and not has(".attn_qkv."),
        "enable_moe_block": has(".ffn_gate_inp."),
        "top_k_experts": raw["num_experts_per_tok"],
        "rope_scaling": None,
        "partial_rotary_factor": None,
        "rope_parameters": {SLIDING: local, FULL: whole},
    }


GEMMA4 = Architecture(
    "gemma4_text",
    extra=(*WINDOW, "attention.value_length_swa"),
    names={
        "stream_scale": "layer_output_scale",
        "router_scale": "router_scale",
        "expert_scale": "expert_scale",
        "expert_norm": "pre_ffw_norm_2",
        "dense_post_norm": "post_ffw_norm_1",
        "expert_post_norm": "post_ffw_norm_2",
        "input_table": "per_layer_token_embd",
        "input_rows": "per_layer_model_proj",
        "input_rows_norm": "per_layer_proj_norm",
        "input_gate": "inp_gate",
        "input_project": "proj",
        "input_norm": "post_norm",
    },
    fields={
        "head_dim_swa": "attention.key_length_swa",
        "rope_dim_swa": "rope.dimension_count_swa",
        "num_kv_shared_layers": "attention.shared_kv_layers",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    },
    rewrites=(
        Rewrite(r"(blk\.\d+)\.ffn_gate_inp\.scale", r"\1.router_scale.weight"),
        Rewrite(r"(blk\.\d+)\.ffn_down_exps\.scale", r"\1.expert_scale.weight"),
    ),
    ragged=(KV_HEADS, WIDTH),
    further=sizes_of_gemma4,
    read_only=True,
)
