"""Tiny models of families with experts, by the options of transformers: those of `newer_mixtures`."""

from __future__ import annotations

from typing import Any

LOCAL, FULL = "sliding_attention", "full_attention"
GRANITE = {"num_local_experts": 6, "num_experts_per_tok": 3, "residual_multiplier": 0.22, "embedding_multiplier": 12.0,
           "logits_scaling": 8.0, "attention_multiplier": 0.3}  # fmt: skip
FEW = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
DBRX = {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.9, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 6, "moe_top_k": 3}}  # fmt: skip
AXK1 = {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "q_lora_rank": 40,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
        "num_key_value_heads": 4, "n_group": 4, "topk_group": 2}  # fmt: skip
LING = {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "num_key_value_heads": 4, "layer_group_size": 2, "num_hidden_layers": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
NEWER: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoe": ("granitemoe", GRANITE | {"attention_bias": True}),
    "granitemoeshared": ("granitemoeshared", GRANITE | {"shared_intermediate_size": 48}),
    "granitemoeshared_alone": ("granitemoeshared", GRANITE | {"shared_intermediate_size": 0}),
    "granitemoe_swa": ("granitemoe_swa", GRANITE | {"shared_intermediate_size": 48, "sliding_window": 5,
                                                    "layer_rope_theta": [0, 10000.0, 500.0]}),
    "exaone_moe": ("exaone_moe", FEW | {"sliding_window": 5, "layer_types": [LOCAL, LOCAL, FULL], "n_group": 4,
                                        "topk_group": 2, "num_shared_experts": 2}),
    "solar_open": ("solar_open", {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3,
                                  "moe_intermediate_size": 40, "routed_scaling_factor": 1.5}),
    "flex_olmo": ("flex_olmo", {"num_experts": 6, "num_experts_per_tok": 2}),
    "flex_olmo_normed": ("flex_olmo", {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True,
                                       "attention_bias": True}),
    "minimax": ("minimax", {"num_local_experts": 6, "num_experts_per_tok": 3, "block_size": 4}),
    "minimax_factors": ("minimax", {
        "num_local_experts": 4, "head_dim": 24, "num_hidden_layers": 4, "block_size": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        **{f"{part}_alpha_factor": 3.5565588200778455 for part in ("full_attn", "linear_attn", "mlp")},
        "full_attn_beta_factor": 0.5, "linear_attn_beta_factor": 0.7, "mlp_beta_factor": 1.3}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 24, "rotary_dim": 12}),
    "hy_v3": ("hy_v3", FEW | {"head_dim": 24}),
    "hy_v3_biases": ("hy_v3", FEW | {"head_dim": 16, "num_shared_experts": 2, "attention_bias": True, "mlp_bias": True,
                                     "mlp_layer_types": ["sparse", "dense", "sparse"], "num_mtp_layers": 0}),
    "mellum": ("mellum", FEW | {"head_dim": 24, "sliding_window": 5, "layer_types": [LOCAL, FULL, LOCAL],
                                "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "aria_text": ("aria_text", {"moe_num_experts": 6, "moe_topk": 3, "intermediate_size": 40, "head_dim": 16}),
    "aria_text_biases": ("aria_text", {"moe_num_experts": 4, "moe_topk": 2, "intermediate_size": 40, "mlp_bias": True,
                                       "moe_num_shared_experts": 1, "attention_bias": True}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"head_dim": 16, "num_experts": 6, "moe_topk": 3}),
    "hunyuan_v1_moe_alpha": ("hunyuan_v1_moe", {
        "head_dim": 24, "num_experts": 4, "moe_topk": [2, 2, 2], "attention_bias": True, "rope_parameters": {
            "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}}),
    "dbrx": ("dbrx", DBRX),
    "dbrx_summed": ("dbrx", DBRX | {"ffn_config": DBRX["ffn_config"] | {"moe_normalize_expert_weights": None}}),
    "axk1": ("axk1", AXK1),
    "axk1_between": ("axk1", AXK1 | {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "bailing_hybrid": ("bailing_hybrid", LING),
    "bailing_hybrid_free": ("bailing_hybrid", LING | {
        "kda_safe_gate": False, "short_conv_kernel_size": 3, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"]}),
    "flint": ("flint", FEW | {"head_dim": 24, "sliding_window": 5, "layer_types": [FULL, LOCAL, LOCAL],
                              "mlp_only_layers": [0], "shared_expert_intermediate_size": 48}),
}  # fmt: skip

OLMO = {"num_hidden_layers": 4, "num_key_value_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]}  # fmt: skip
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo_hybrid": ("olmo_hybrid", OLMO),
    "olmo_hybrid_turned": ("olmo_hybrid", OLMO | {"num_key_value_heads": 2, "linear_allow_neg_eigval": False,
                                                  "attention_bias": True, "rope_parameters": {
                                                      "rope_type": "default", "rope_theta": 500.0}}),
    "olmo_hybrid_usual": ("olmo_hybrid", {"num_hidden_layers": 3, "num_key_value_heads": 4}),
}  # fmt: skip
"""Without experts."""
