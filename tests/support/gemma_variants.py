"""Tiny Gemmas whose layers differ in their sizes, by the options of transformers."""

from __future__ import annotations

from typing import Any

SIZES = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 5, "hidden_size_per_layer_input": 0,
         "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
         "final_logit_softcapping": 2.0}  # fmt: skip
WINDOWS = {name: fact for name, fact in SIZES.items() if name not in ("sliding_window", "final_logit_softcapping")}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}
INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99}
GEMMA3N = {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "laurel_rank": 8,
           "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 2.0,
           "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0]} | INPUTS  # fmt: skip
GEMMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("gemma4_text", SIZES),
    "gemma4_keys_as_values": ("gemma4_text", SIZES | {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "tie_word_embeddings": False}),
    "gemma4_shared_keys": ("gemma4_text", SIZES | {
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "attention_bias": True,
        "output_hidden_states": True}),
    "gemma4_windows": ("gemma4_text", WINDOWS | {"attention_k_eq_v": True, "num_hidden_layers": 6,
                                                 "layer_types": ["sliding_attention", "sliding_attention",
                                                                 "full_attention"] * 2}),
    "gemma4_layer_inputs": ("gemma4_text", SIZES | INPUTS),
    "gemma4_experts": ("gemma4_text", SIZES | EXPERTS | {"attention_k_eq_v": True}),
    "gemma4_unified": ("gemma4_unified_text", {
        name: fact for name, fact in SIZES.items() if name != "hidden_size_per_layer_input"} | {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4_small_windows": ("gemma4_text", {
        **WINDOWS, **INPUTS, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention"] * 3}),
    "gemma4_small": ("gemma4_text", SIZES | INPUTS | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
}  # fmt: skip
GEMMAS |= {
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "gemma3n_sparse": ("gemma3n_text", GEMMA3N | {
        "intermediate_size": [96, 96, 64, 128], "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0],
        "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 80}),
}  # fmt: skip
