"""Models of newer families by the architecture that they are written as in GGUF files (see `gguf_written`)."""

from __future__ import annotations

from typing import Any

from gguf_writing import VOCAB

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
INDEXER = {"index_n_heads": 8, "index_head_dim": 64, "index_topk": 6}
GROWN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 8, "mscale": 1.0,
         "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}  # fmt: skip
MINIMAX_M3 = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "head_dim": 16, "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 16,
    "index_topk_blocks": 2, "dense_intermediate_size": 80, "intermediate_size": 40,
    "shared_intermediate_size": 40, "num_local_experts": 6, "num_experts_per_tok": 3,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"]
}  # fmt: skip
LIGHTNING = SIX | {"rms_norm_eps": 1e-6, "block_size": 4,
                   **{f"{part}_alpha_factor": 3.5 for part in ("full_attn", "linear_attn", "mlp")}}  # fmt: skip
STEP = {"head_dim": 16, "num_hidden_layers": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "share_expert_dim": 48, "sliding_window": 5,
        "layer_types": [FULL, LOCAL, LOCAL, FULL], "num_sliding_attention_heads": 8, "moe_router_scaling_factor": 1.7,
        "swiglu_limits": [0.0, 0.0, 0.04, 0.03], "swiglu_limits_shared": [0.05, 0.0, 0.02, 0.0],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
            LOCAL: {"rope_type": "default", "rope_theta": 1e3}}}  # fmt: skip
GLM5 = LATENTS | ROUTED | INDEXER | {
    "qk_rope_head_dim": 0, "num_hidden_layers": 4, "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "n_group": 1, "topk_group": 1, "v_head_dim": 16, "n_shared_experts": 1, "index_topk": 8, "index_kpool": 4,
    "linear_head_dim": 32, "linear_num_heads": 4, "hc_sinkhorn_iters": 4, "swiglu_limit": 0.5,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}  # fmt: skip
ENTRIES = {
    "head_dim": 32, "num_key_value_heads": 1, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 32,
    "sliding_window": 8, "index_n_heads": 8, "index_head_dim": 64, "index_topk": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "partial_rotary_factor": 0.5, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"], "swiglu_limit": 0.5}  # fmt: skip
QWEN4 = FEW | {
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["indexed_attention"], "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "shared_expert_intermediate_size": 48, "hc_count": 3, "hc_lowrank": 32, "indexer_n_heads": 2,
    "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 32, "indexer_compress_ratio": 16,
    "output_gate_type": "sigmoid", "ple_layer_ids": [2], "ple_embed_dim": 64, "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                        "mrope_section": [3, 3, 2], "mrope_interleaved": True}}  # fmt: skip
EXTENDED = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                "original_max_position_embeddings": 32}}  # fmt: skip
NEWER: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoe": ("granitemoe", MULTIPLIERS | SIX),
    "granitemoe shared": ("granitemoeshared", MULTIPLIERS | SIX | {"shared_intermediate_size": 48}),
    "granite_swa experts": ("granitemoe_swa", FOUR | MULTIPLIERS | SIX | {"shared_intermediate_size": 48}),
    "granite_swa": ("granite_swa", FOUR | MULTIPLIERS),
    "granite_swa turns": ("granite_swa", FOUR | {"layer_rope_theta": [0, 1e4, 1e4, 0]}),
    "exaone-moe": ("exaone_moe", FEW | {"sliding_window": 5, "layer_types": [LOCAL, LOCAL, FULL], "n_group": 4,
                                        "topk_group": 2, "num_shared_experts": 2}),
    "minimax-m2": ("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 24, "rotary_dim": 12}),
    "hy_v3": ("hy_v3", FEW | {"head_dim": 24, "num_shared_experts": 2}),
    "mellum": ("mellum", FEW | {"head_dim": 24, "sliding_window": 5, "layer_types": [LOCAL, FULL, LOCAL]}),
    "mellum one base": ("mellum", FEW | {
        "head_dim": 24, "sliding_window": 5, "layer_types": [LOCAL, FULL, LOCAL],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in (LOCAL, FULL)}}),
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
    "hy_v4": ("hy_v4", LATENTS | ROUTED | INDEXER | {"num_key_value_heads": 4, "v_head_dim": 16, "q_lora_rank": 32,
                                                      "n_group": 1, "topk_group": 1, "hc_magnitude": 1.5,
                                                      "swiglu_limit": 0.5}),
    "dots3note": ("dots3_note_text", LATENTS | ROUTED | INDEXER | {
        "num_hidden_layers": 4, "v_head_dim": 16, "q_lora_rank": 32, "n_group": 1, "topk_group": 1, "index_topk": 64,
        "shared_experts_intermediate_size": 32, "sliding_window": 5, "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 8, "swa_q_lora_rank": 32, "swa_kv_lora_rank": 64, "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 24, "swa_v_head_dim": 16}),
    "glm5-next": ("glm5_next_text", GLM5),
    "glm5-next unbounded": ("glm5_next_text", GLM5 | {
        "swiglu_limit": 1.0, "linear_lower_bound": None, "hc_eps": 1e-3, "indexer_types": ["full"] * 4}),
    "deepseek4": ("deepseek_v4", ENTRIES),
    "deepseek4 yarn": ("deepseek_v4", ENTRIES | EXTENDED),
    "deepseek4 yarn last": ("deepseek_v4", ENTRIES | EXTENDED | {"layer_types": ENTRIES["layer_types"][::-1]}),
    "minicpm3": ("minicpm3", LATENTS | {"q_lora_rank": 32, "v_head_dim": 16}),
    "deepseek": ("deepseek", {}),
    "deepseek2 fourth": ("kimi_k2", {}),
    "deepseek2 dense": ("youtu", LATENTS | {"pad_token_id": None}),
    "xverse": ("xverse", {}),
    "chatglm published": ("chatglm", {}),
    "gpt2 published": ("gpt-sw3", {}),
    "llama internlm": ("internlm", {}),
    "llama iquestcoder": ("iquestcoder", {"head_dim": 16}),
    "bailingmoe": ("bailing_moe", {}),
    "bailingmoe2": ("bailing_moe_v2", {"n_group": 4, "topk_group": 2}),
    "dbrx": ("dbrx", {"d_model": 128, "n_heads": 4, "n_layers": 3, "attn_config": {
        "kv_n_heads": 2, "clip_qkv": 0.9, "rope_theta": 1e4}, "ffn_config": {
        "ffn_hidden_size": 64, "moe_num_experts": 6, "moe_top_k": 3}}),
    "hunyuan-moe": ("hunyuan_v1_moe", {"head_dim": 24, "num_experts": 6, "moe_topk": 3}),
    "minimax-m3": ("minimax_m3_vl_text", MINIMAX_M3),
    "minimax-m3 all blocks": ("minimax_m3_vl_text", MINIMAX_M3 | {"index_topk_blocks": 3}),
    "minimax-m3 sparse": ("minimax_m3_vl_text", MINIMAX_M3 | {
        "layer_types": ["minimax_m3_sparse"] * 3, "mlp_layer_types": ["sparse"] * 3}),
    "glm4moe without norms": ("solar_open", {
        "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "routed_scaling_factor": 1.5}),
    "mistral4": ("mistral4", LATENTS | ROUTED | {"rope_parameters": GROWN | {"original_max_position_embeddings": 6}}),
    "laguna": ("laguna", FEW | {
        "head_dim": 16, "sliding_window": 5, "shared_expert_intermediate_size": 48, "moe_routed_scaling_factor": 1.7,
        "num_attention_heads_per_layer": [4, 8, 4], "layer_types": [FULL, LOCAL, LOCAL]}),
    "laguna numbers": ("laguna", FEW | {
        "head_dim": 24, "shared_expert_intermediate_size": 48, "gating": "per-element",
        "mlp_layer_types": ["dense", "sparse", "sparse"], "rope_parameters": {"full_attention": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.5}}}),
    "mimo2": ("mimo_v2_flash", {
        "head_dim": 24, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "sliding_window": 5,
        "moe_intermediate_size": 40, "num_hidden_layers": 4, "n_group": 2, "layer_types": [FULL, LOCAL] * 2,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
                            for kind, theta in ((FULL, 1e5), (LOCAL, 1e3))}}),
    "hrm_text": ("hrm_text", {"num_hidden_layers": 2, "head_dim": 16, "num_key_value_heads": 4,
                              "initializer_range": 0.5}),
    "nemotron_h": ("nemotron_h", {
        "hybrid_override_pattern": "M-*M", "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 16,
        "n_groups": 2, "ssm_state_size": 16, "head_dim": 16}),
    "bitnet": ("bitnet", {"hidden_act": "silu", "tie_word_embeddings": True}),
    "mistral4 near": ("mistral4", LATENTS | ROUTED | {
        "rope_parameters": GROWN | {"original_max_position_embeddings": 64}}),
    "bailingmoe2 one": ("bailing_moe_v2", {"n_group": 4, "topk_group": 2, "n_shared_experts": 1}),
    "plamo": ("plamo", {}),
    "muse-glimmer": ("muse_glimmer_text", FOUR | {"head_dim": 16, "qk_scale_factor": 2.5}),
    "minimax-01": ("minimax", LIGHTNING | {"layer_types": ["linear_attention", FULL, "linear_attention"]}),
    "minimax-01 eighth": ("minimax", LIGHTNING | {
        "num_hidden_layers": 8, "layer_types": [*["linear_attention"] * 7, FULL]}),
    "bailingmoe3": ("bailing_hybrid", FEW | {
        "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 16,
        "num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "layer_group_size": 2,
        "num_hidden_layers": 4, "kda_lower_bound": -3.0}),
    "qwen4exp": ("qwen4_exp_text", QWEN4),
    "qwen4exp one block": ("qwen4_exp_text", QWEN4 | {"indexer_budget": 16}),
    "qwen4exp no n-grams": ("qwen4_exp_text", QWEN4 | {"ple_layer_ids": []}),
    "step35": ("step3p5", STEP),
    "step35 scaled": ("step3p5", STEP | {"rope_parameters": STEP["rope_parameters"] | {FULL: {
        "rope_type": "llama3", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}}),
    "mistral3": ("ministral3", {"head_dim": 24, "rope_parameters": GROWN}),
}  # fmt: skip
GEMMA3N = {"hidden_size": 128, "head_dim": 32, "sliding_window": 5, "num_hidden_layers": 22, "num_kv_shared_layers": 2,
           "layer_types": [*[*[LOCAL] * 4, FULL] * 4, LOCAL, FULL],
           "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12,
           "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": VOCAB}  # fmt: skip
"""llama.cpp's code has these sizes of the releases, whatever a file says: 20 layers with keys of their own, of which
the first ten cut gates."""
DEEP: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n shared": ("gemma3n_text", GEMMA3N),
    "baichuan seven": ("baichuan", {"num_hidden_layers": 32}),
    "baichuan thirteen": (
        "baichuan",
        {"num_hidden_layers": 40, "max_position_embeddings": None, "model_max_length": 128},
    ),
}
"""Models of so many layers that even transformers in f32 and in f64 differ by more than 1e-5."""
