"""Families and settings that GGUF files are written of."""

from __future__ import annotations

from typing import Any

GEMMA = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16, "final_logit_softcapping": 2.0}
EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2}
NARROW = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}  # fmt: skip
GPT_OSS = EIGHT | {"head_dim": 16, "sliding_window": 5, "rope_parameters": YARN}
GLM = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1,
       "first_k_dense_replace": 1, "use_qk_norm": True, "routed_scaling_factor": 1.5}  # fmt: skip
LFM2 = {"layer_types": ["conv", "full_attention", "conv"]}
DELTA = {"head_dim": 16, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip
EVERY_SECOND = {"layer_types": ["linear_attention", "full_attention"] * 2}
THIRD = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
SCANS = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
GRANITE = SCANS | {"layer_types": ["mamba", "attention", "mamba"], "embedding_multiplier": 12.0, "logits_scaling": 8.0,
                   "residual_multiplier": 0.22, "attention_multiplier": 0.3}  # fmt: skip
FALCON = SCANS | {"mamba_d_ssm": 128, "head_dim": 24, "mamba_norm_before_gate": False}
MULTIPLIED = {"embedding_multiplier": 3.5, "lm_head_multiplier": 0.4, "mlp_multipliers": [0.8, 0.3],
              "key_multiplier": 0.6, "attention_in_multiplier": 0.9, "attention_out_multiplier": 0.7,
              "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.36],
              "ssm_out_multiplier": 0.47}  # fmt: skip
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4, "ssm_state_size": 16, "head_dim": 24}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1,
          "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 2.5}  # fmt: skip
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 32}
LATENTS = {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "q_lora_rank": 40,
           "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
           "num_key_value_heads": 4, "first_k_dense_replace": 1}  # fmt: skip
KIMI = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "kv_lora_rank": 32, "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8, "v_head_dim": 20, "q_lora_rank": None, "num_local_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 32, "n_shared_experts": 1, "linear_head_dim": 32, "linear_num_heads": 4}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "head_dim": 24}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "gemma": ("gemma", {"head_dim": 24}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 0.7}),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 7}),
    "phi2": ("phi", {}),
    "phi3": ("phi3", {}),
    "mixtral": ("mixtral", EIGHT),
    "qwen2moe": ("qwen2_moe", NARROW | {"shared_expert_intermediate_size": 64}),
    "qwen3moe": ("qwen3_moe", NARROW | {"head_dim": 24, "norm_topk_prob": True}),
    "glm4moe": ("glm4_moe", GLM),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "qwen3next": ("qwen3_next", NARROW | SHARED | DELTA | EVERY_SECOND),
    "qwen35": ("qwen3_5_text", DELTA | EVERY_SECOND),
    "qwen35 three": ("qwen3_5_text", DELTA | THIRD | {"linear_num_value_heads": 6, "linear_value_head_dim": 24}),
    "qwen35 one": ("qwen3_5_text", DELTA | THIRD | {"linear_num_value_heads": 2, "tie_word_embeddings": True}),
    "qwen35moe": ("qwen3_5_moe_text", NARROW | SHARED | DELTA | EVERY_SECOND),
    "granitehybrid": ("granitemoehybrid", GRANITE | {
        "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 48}),
    "granitehybrid dense": ("granitemoehybrid", GRANITE | {
        "num_local_experts": 0, "shared_intermediate_size": 96, "mamba_n_groups": 1, "tie_word_embeddings": True}),
    "falcon-h1": ("falcon_h1", FALCON | MULTIPLIED),
    "falcon-h1 normed": ("falcon_h1", FALCON | {"mamba_rms_norm": True, "mamba_conv_bias": False}),
    "nemotron_h": ("nemotron_h", NEMOTRON | {"hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5}),
    "nemotron_h_moe": ("nemotron_h", NEMOTRON | ROUTED | {"hybrid_override_pattern": "ME*EM", "num_hidden_layers": 5}),
    "nemotron_h_moe latents": ("nemotron_h", NEMOTRON | ROUTED | {
        "hybrid_override_pattern": "MEM*E", "num_hidden_layers": 5, "moe_latent_size": 32, "norm_topk_prob": False,
        "n_group": 4, "topk_group": 2}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2}),
    "mamba2 tied": ("mamba2", {
        "num_heads": 4, "head_dim": 32, "state_size": 24, "n_groups": 1, "conv_kernel": 3, "use_conv_bias": False,
        "tie_word_embeddings": True}),
    "mamba": ("mamba", {"state_size": 8, "time_step_rank": 32}),
    "falcon-mamba": ("falcon_mamba", {"state_size": 16, "time_step_rank": 32}),
    "jamba": ("jamba", JAMBA | {"num_experts": 6, "num_experts_per_tok": 3}),
    "jamba dense": ("jamba", JAMBA | {"num_experts": 1, "attn_layer_period": 3, "tie_word_embeddings": True}),
    "deepseek2": ("deepseek_v2", LATENTS | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek2 groups": ("deepseek_v2", LATENTS | {
        "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}),
    "deepseek2 third": ("deepseek_v3", LATENTS | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}),
    "deepseek2 yarn": ("deepseek_v3", LATENTS | {
        "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
            "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "kimi-linear": ("kimi_linear", KIMI),
    "lfm2": ("lfm2", LFM2 | {"block_auto_adjust_ff_dim": False}),
    "lfm2moe": ("lfm2_moe", LFM2 | NARROW | {"num_dense_layers": 1}),
}  # fmt: skip
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
