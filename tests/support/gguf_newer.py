"""Models of newer families by the architecture that they are written as in GGUF files (see `gguf_written`)."""

from __future__ import annotations

from typing import Any

MULTIPLIERS = {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
               "attention_multiplier": 0.3}  # fmt: skip
SIX = {"num_local_experts": 6, "num_experts_per_tok": 3}
LOCAL, FULL = "sliding_attention", "full_attention"
FEW = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
FOUR = {"num_hidden_layers": 4, "sliding_window": 5}
LATENTS = {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "q_lora_rank": 40,
           "num_key_value_heads": 4}  # fmt: skip
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
          "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}  # fmt: skip
INDEXER = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 6}
NEWER: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoe": ("granitemoe", MULTIPLIERS | SIX),
    "granitemoe shared": ("granitemoeshared", MULTIPLIERS | SIX | {"shared_intermediate_size": 48}),
    "granite_swa": ("granite_swa", FOUR | MULTIPLIERS),
    "granite_swa turns": ("granite_swa", FOUR | {"layer_rope_theta": [0, 1e4, 1e4, 0]}),
    "exaone-moe": ("exaone_moe", FEW | {"sliding_window": 5, "layer_types": [LOCAL, LOCAL, FULL], "n_group": 4,
                                        "topk_group": 2, "num_shared_experts": 2}),
    "minimax-m2": ("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 24, "rotary_dim": 12}),
    "hy_v3": ("hy_v3", FEW | {"head_dim": 24, "num_shared_experts": 2}),
    "mellum": ("mellum", FEW | {"head_dim": 24, "sliding_window": 5, "layer_types": [LOCAL, FULL, LOCAL]}),
    "afmoe": ("afmoe", FEW | FOUR | {"head_dim": 16, "mup_enabled": True, "num_dense_layers": 1,
                                     "num_shared_experts": 2}),
    "cohere2moe": ("cohere2_moe", FOUR | {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3,
                                          "first_k_dense_replace": 1, "num_shared_experts": 1}),
    "llama4": ("llama4_text", {"num_local_experts": 6, "num_experts_per_tok": 1, "num_hidden_layers": 4,
                               "intermediate_size_mlp": 64, "head_dim": 16}),
    "exaone": ("exaone", {}),
    "minicpm": ("minicpm", {}),
    "orion": ("orion", {}),
    "qwen": ("qwen", {}),
    "jais2": ("jais2", {}),
    "apertus": ("apertus", {"head_dim": 24}),
    "hunyuan-dense": ("hunyuan_v1_dense", {"head_dim": 24}),
    "deepseek2 lite": ("glm4_moe_lite", LATENTS | ROUTED),
    "deepseek32": ("deepseek_v32", LATENTS | ROUTED | INDEXER),
    "glm-dsa": ("glm_moe_dsa", LATENTS | ROUTED | INDEXER),
    "minicpm3": ("minicpm3", LATENTS | {"q_lora_rank": 32}),
}  # fmt: skip
