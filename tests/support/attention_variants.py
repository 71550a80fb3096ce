"""Tiny models whose attention, or the way layers are joined, is a family's own, by the options of transformers."""

from __future__ import annotations

from typing import Any

SIZES = {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "q_lora_rank": 40,
         "num_key_value_heads": 4}  # fmt: skip
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2}
GROUPS = {"n_group": 4, "topk_group": 2}
LATENT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe_lite": ("glm4_moe_lite", SIZES | ROUTED),
    "glm4_moe_lite_kinds": ("glm4_moe_lite", SIZES | ROUTED | GROUPS | {
        "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True, "rope_interleave": False,
        "q_lora_rank": None, "norm_topk_prob": False}),
    "youtu": ("youtu", SIZES),
    "youtu_straight": ("youtu", SIZES | {"q_lora_rank": None, "tie_word_embeddings": False, "attention_bias": True}),
    "minicpm3": ("minicpm3", SIZES | {"dim_model_base": 48}),
    "minicpm3_biases": ("minicpm3", SIZES | {"scale_depth": 0.7, "scale_emb": 3.5, "mlp_bias": True,
                                             "attention_bias": True, "tie_word_embeddings": False}),
    "minicpm3_plain": ("minicpm3", SIZES | {"scale_depth": None, "dim_model_base": None, "q_lora_rank": None}),
}  # fmt: skip
