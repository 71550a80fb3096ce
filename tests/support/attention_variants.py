"""Tiny models whose attention, or the way layers are joined, is a family's own, by the options of transformers."""

from __future__ import annotations

from typing import Any

SIZES = {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "q_lora_rank": 40,
         "num_key_value_heads": 4}  # fmt: skip
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2}
GROUPS = {"n_group": 4, "topk_group": 2}
FAR = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 6,
       "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1}  # fmt: skip
LONGCAT = {"num_hidden_layers": 4, "head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "zero_expert_num": 4,
           "moe_topk": 3, "expert_ffn_hidden_size": 32, "routed_scaling_factor": 1.5}  # fmt: skip
LATENT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe_lite": ("glm4_moe_lite", SIZES | ROUTED),
    "glm4_moe_lite_kinds": ("glm4_moe_lite", SIZES | ROUTED | GROUPS | {
        "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True, "rope_interleave": False,
        "q_lora_rank": None, "norm_topk_prob": False}),
    "youtu": ("youtu", SIZES | {"pad_token_id": None}),
    "youtu_straight": ("youtu", SIZES | {"q_lora_rank": None, "tie_word_embeddings": False, "attention_bias": True}),
    "mistral4": ("mistral4", SIZES | ROUTED | {"rope_parameters": FAR}),
    "mistral4_groups": ("mistral4", SIZES | ROUTED | GROUPS | {
        "first_k_dense_replace": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.4, "q_lora_rank": None,
        "rope_parameters": FAR | {"mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.3}}),
    "minicpm3": ("minicpm3", SIZES | {"dim_model_base": 48}),
    "minicpm3_biases": ("minicpm3", SIZES | {"scale_depth": 0.7, "scale_emb": 3.5, "mlp_bias": True,
                                             "attention_bias": True, "tie_word_embeddings": False}),
    "longcat_flash": ("longcat_flash", SIZES | LONGCAT),
    "longcat_flash_biases": ("longcat_flash", SIZES | LONGCAT | {
        "attention_bias": True, "zero_expert_num": 2, "moe_topk": 2, "num_hidden_layers": 2, "rope_parameters": FAR}),
    "minicpm3_plain": ("minicpm3", SIZES | {"scale_depth": None, "dim_model_base": None, "q_lora_rank": None}),
}  # fmt: skip

ALTERNATING = {"num_hidden_layers": 4, "sliding_window": 5}
AFMOE = {"head_dim": 24, "sliding_window": 5, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "route_scale": 1.7}  # fmt: skip
LAGUNA = {"head_dim": 16, "sliding_window": 5, "num_experts": 8, "num_experts_per_tok": 3,
          "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48,
          "moe_routed_scaling_factor": 1.7}  # fmt: skip
KOLIBRI = {"head_dim": 16, "sliding_window": 5, "num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 5,
           "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48}  # fmt: skip
MIMO = {
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.334},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
    },
}
PLAIN_KINDS = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
               "full_attention": {"rope_type": "default", "rope_theta": 1e5}}  # fmt: skip
HRM = {"num_hidden_layers": 2, "head_dim": 16, "num_key_value_heads": 4}
MUSE = {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 4}
GATED_DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "hrm_text": ("hrm_text", HRM | {"initializer_range": 0.5}),
    "hrm_text_turns": ("hrm_text", HRM | {"num_hidden_layers": 1, "H_cycles": 3, "L_cycles": 1, "head_dim": 24,
                                          "attention_bias": True, "mlp_bias": True, "embedding_scale": 2.0,
                                          "tie_word_embeddings": True}),
    "muse_glimmer": ("muse_glimmer_text", MUSE),
    "muse_glimmer_thetas": ("muse_glimmer_text", MUSE | {
        "layer_rope_theta": [0, 500.0, 500.0], "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "head_dim": 24, "attention_bias": True,
        "final_logit_softcapping": 2.0, "post_norm_eps": 0.3, "num_key_value_heads": 4, "num_hidden_layers": 3}),
    "lfm3": ("lfm3", {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 4, "rope_parameters": PLAIN_KINDS,
                      "layer_types": ["conv", "sliding_attention", "full_attention", "conv"]}),
    "lfm3_proportional": ("lfm3", {"head_dim": 24, "sliding_window": 5, "num_hidden_layers": 5}),
    "lfm3_bare": ("lfm3", {"head_dim": 24, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True,
                           "attention_bias": True, "use_sandwich_norm": False, "use_attention_gate": False,
                           "conv_L_cache": 4, "tie_word_embeddings": False, "rope_parameters": PLAIN_KINDS}),
}  # fmt: skip
KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
STEP = {"head_dim": 16, "num_hidden_layers": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "share_expert_dim": 48, "sliding_window": 5, "layer_types": KINDS,
        "num_sliding_attention_heads": 8, "moe_router_scaling_factor": 1.7, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}}  # fmt: skip
GATED: dict[str, tuple[str, dict[str, Any]]] = {
    "step3p5": ("step3p5", STEP | {"swiglu_limits": [0.0, 0.0, 0.4, 0.3], "swiglu_limits_shared": [0.5, 0.0, 0.2, 0.0],
                                   "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}),
    "step3p5_biases": ("step3p5", STEP | {"mlp_layer_types": ["sparse", "dense", "dense", "sparse"], "mlp_bias": True,
                                          "attention_bias": True, "num_sliding_attention_heads": 2,
                                          "query_pre_attn_scalar": 24}),
    "afmoe": ("afmoe", AFMOE | {"num_hidden_layers": 4, "mup_enabled": True}),
    "afmoe_kinds": ("afmoe", AFMOE | {"layer_types": ["full_attention", "sliding_attention", "full_attention"],
                                      "num_dense_layers": 2, "attention_bias": True, "num_shared_experts": 1}),
    "laguna": ("laguna", LAGUNA | {"num_attention_heads_per_layer": [4, 8, 4],
                                   "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
    "laguna_numbers": ("laguna", LAGUNA | {
        "gating": "per-element", "attention_bias": True, "moe_router_logit_softcapping": 0.6, "head_dim": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "kolibri1": ("kolibri1", KOLIBRI),
    "kolibri1_summed": ("kolibri1", KOLIBRI | {
        "norm_topk_prob": True, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "head_dim": 24, "num_hidden_layers": 3}),
    "mimo_v2_flash": ("mimo_v2_flash", MIMO | {"layer_types": [
        "full_attention", "sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 4}),
    "mimo_v2_flash_biases": ("mimo_v2_flash", MIMO | {
        "head_dim": 32, "v_head_dim": 16, "attention_bias": True, "attention_value_scale": None, "n_group": 2,
        "norm_topk_prob": False, "routed_scaling_factor": 1.3, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "cohere2_moe": ("cohere2_moe", ALTERNATING | {"head_dim": 16, "num_experts": 6, "tie_word_embeddings": False}),
    "cohere2_moe_shared": ("cohere2_moe", ALTERNATING | {
        "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 2, "rms_norm_eps": 1e-5,
        "expert_selection_fn": "sigmoid", "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
        "prefix_dense_intermediate_size": 80, "tie_word_embeddings": False}),
    "cohere2_moe_summed": ("cohere2_moe", {
        "head_dim": 16, "num_shared_experts": 1, "shared_expert_combination_strategy": "sum", "attention_bias": True,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "prefix_dense_sliding_window_pattern": 2,
        "expert_selection_fn": "sigmoid", "norm_topk_prob": False, "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"], "tie_word_embeddings": False}),
}  # fmt: skip
