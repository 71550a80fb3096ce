"""Tiny models whose layers attend to tokens that an indexer chooses, by the options of transformers."""

from __future__ import annotations

from typing import Any

from model_variants import LATENT_GROUPS, LATENT_SIZES
from paged_model import HALF_ROPE, YARN

INDEXER = {"index_n_heads": 8, "index_head_dim": 16}
SIZES = LATENT_SIZES | INDEXER
AXK2 = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
        "num_key_value_heads": 4, "gated_norm_rank": 8}  # fmt: skip
HY4 = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_key_value_heads": 4,
       "num_hidden_layers": 4, "index_topk": 6, "swiglu_limit": 0.25}  # fmt: skip
LOCAL, FULL = "sliding_attention", "full_attention"
DOTS3 = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_attention_heads": 8,
         "num_key_value_heads": 8, "shared_experts_intermediate_size": 32, "num_hidden_layers": 4, "sliding_window": 5,
         "swa_num_attention_heads": 16, "swa_num_key_value_heads": 16, "swa_q_lora_rank": 40, "swa_kv_lora_rank": 48,
         "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 12}  # fmt: skip
GLM5_NEXT = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_key_value_heads": 4,
             "num_hidden_layers": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "v_head_dim": 20, "q_lora_rank": 40,
             "layer_types": ["linear_attention", "indexed_attention"] * 2, "swiglu_limit": 0.25,
             "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "linear_head_dim": 16, "linear_num_heads": 4,
             "index_topk": 4, "index_kpool": 2, "hc_sinkhorn_iters": 4}  # fmt: skip
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("deepseek_v32", SIZES | LATENT_GROUPS | {"index_topk": 6}),
    "deepseek_v32_yarn": (
        "deepseek_v32",
        SIZES | LATENT_GROUPS | {"index_topk": 4, "attention_bias": True, "rope_parameters": YARN},
    ),
    "glm_moe_dsa": ("glm_moe_dsa", SIZES | {"index_topk": 6}),
    "glm_moe_dsa_shared": (
        "glm_moe_dsa",
        SIZES | {"index_topk": 5, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "full"],
                 "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    ),
    "axk2": ("axk2", SIZES | AXK2 | {"index_topk": 6}),
    "axk2_kinds": ("axk2", SIZES | AXK2 | {"index_topk": 5, "attention_bias": True, "gated_norm_rank": 4,
                                           "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "hy_v4": ("hy_v4", SIZES | HY4),
    "hy_v4_kinds": ("hy_v4", SIZES | HY4 | {"hc_mult": 2, "hc_magnitude": 1.5, "hc_eps": 1e-3, "swiglu_limit": 1.0,
                                            "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"],
                                            "rope_parameters": YARN, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "dots3_note": ("dots3_note_text", SIZES | DOTS3 | {"index_topk": 6}),
    "dots3_note_kinds": ("dots3_note_text", SIZES | DOTS3 | LATENT_GROUPS | {
        "use_dsa": False, "attention_bias": True, "swa_head_dim": 28, "swa_q_lora_rank": 24, "n_shared_experts": 2,
        "layer_types": [LOCAL, FULL, LOCAL, FULL], "rope_parameters": YARN,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}),
    "glm5_next": ("glm5_next_text", INDEXER | GLM5_NEXT),
    "glm5_next_kinds": ("glm5_next_text", INDEXER | GLM5_NEXT | {
        "hc_mult": 2, "hc_eps": 1e-3, "index_topk": 6, "index_kpool": 3, "swiglu_limit": 1.0,
        "linear_lower_bound": None,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
        "indexer_types": ["full", "full", "shared", "full"]}),
}  # fmt: skip
BLOCKS = {"num_hidden_layers": 3, "rope_parameters": HALF_ROPE,
          "head_dim": 16, "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 16,
          "index_block_size": 4, "index_topk_blocks": 2, "dense_intermediate_size": 80, "intermediate_size": 40,
          "shared_intermediate_size": 48, "num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": 0.5,
          "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
          "mlp_layer_types": ["dense", "sparse", "sparse"]}  # fmt: skip
BLOCK_SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "minimax_m3": ("minimax_m3_vl_text", BLOCKS),
    "minimax_m3_local": ("minimax_m3_vl_text", BLOCKS | {"index_topk_blocks": 3, "index_local_blocks": 2}),
}
POOLED_SIZES = {
    "num_hidden_layers": 4, "head_dim": 16, "rope_parameters": HALF_ROPE,
    "layer_types": ["linear_attention", "linear_attention", "indexed_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "hc_count": 3, "hc_lowrank": 32, "indexer_n_heads": 3, "indexer_kv_heads": 1, "indexer_head_dim": 16,
    "indexer_budget": 8, "indexer_compress_ratio": 4, "output_gate_type": "sigmoid", "ple_layer_ids": [2],
    "ple_embed_dim": 32, "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4}  # fmt: skip
POOLED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen4_exp": ("qwen4_exp_text", POOLED_SIZES),
    "qwen4_exp_kinds": ("qwen4_exp_text", POOLED_SIZES | {
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
        "ple_layer_ids": [4], "ngram_size": 4, "heads_per_ngram": 1, "ple_embed_dim": 24, "ple_conv_kernel_size": 3,
        "split_ngram_parts": 1, "hc_count": 2, "output_gate_type": None, "indexer_n_heads": 1, "indexer_budget": 4,
        "eos_token_id": [5, 2], "norm_topk_prob": False, "tie_word_embeddings": True}),
    "qwen4_exp_no_ngrams": ("qwen4_exp_text", POOLED_SIZES | {
        "ple_layer_ids": [], "num_hidden_layers": 2, "layer_types": ["indexed_attention", "linear_attention"],
        "indexer_budget": 6, "indexer_compress_ratio": 2, "linear_conv_kernel_dim": 3}),
}  # fmt: skip
"""Attention to blocks by one key for each, gated residuals, and embeddings of n-grams."""
KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
DEEPSEEK_V4 = {"head_dim": 32, "num_key_value_heads": 1, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 20,
               "sliding_window": 5, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 2, "n_routed_experts": 8,
               "num_experts_per_tok": 3, "moe_intermediate_size": 40, "partial_rotary_factor": 0.25,
               "num_hidden_layers": 4, "layer_types": [KINDS[0], KINDS[1], KINDS[2], KINDS[1]],
               "compress_rates": {KINDS[1]: 2, KINDS[2]: 8}, "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
               "swiglu_limit": 0.25}  # fmt: skip
ENTRIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v4": ("deepseek_v4", DEEPSEEK_V4),
    "deepseek_v4_kinds": (
        "deepseek_v4",
        DEEPSEEK_V4 | {"compress_rates": {KINDS[1]: 4, KINDS[2]: 4}, "hc_mult": 2, "hc_sinkhorn_iters": 3,
                       "hc_eps": 1e-3, "num_hidden_layers": 3, "layer_types": [KINDS[2], KINDS[1], KINDS[1]],
                       "mlp_layer_types": ["moe", "moe", "hash_moe"], "rope_parameters": YARN},
    ),
}  # fmt: skip
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32_short": ("deepseek_v32", SIZES | LATENT_GROUPS),
    "glm_moe_dsa_short": ("glm_moe_dsa", SIZES),
    "axk2_short": ("axk2", SIZES | AXK2),
    "dots3_note_short": ("dots3_note_text", SIZES | DOTS3),
}
"""Of sequences shorter than what they choose."""
WHOLE = DENSE | {
    "minimax_m3_short": (
        "minimax_m3_vl_text",
        BLOCKS | {"index_block_size": 16, "dense_intermediate_size": 128, "shared_intermediate_size": 128},
    ),
    "qwen4_exp_short": (
        "qwen4_exp_text",
        POOLED_SIZES
        | {
            "num_hidden_layers": 2,
            "ple_layer_ids": [1],
            "layer_types": ["linear_attention", "indexed_attention"],
            "indexer_compress_ratio": 16,
            "indexer_budget": 32,
            "hc_lowrank": 64,
            "ple_embed_dim": 64,
            "hc_count": 2,
        },
    ),
}
"""Those that read all of a short sequence, whatever rounding does to scores."""
