"""What GGUF calls roles and fields of config.json. See docs/design/weight-formats.md."""

from __future__ import annotations

from quire.model.disk.renamed_tensors import Rewrite

NAMES = {
    "embed": "token_embd",
    "positions": "position_embd",
    "token_types": "token_types",
    "embed_norm": "token_embd_norm",
    "final_norm": "output_norm",
    "head": "output",
    "layer": "blk.{}.",
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "qkv": "attn_qkv",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "q_row_norm": "attn_q_norm",
    "k_row_norm": "attn_k_norm",
    "q_head_norms": "attn_q_norm",
    "k_head_norms": "attn_k_norm",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "gate_up": "ffn_up",
    "down": "ffn_down",
    "mlp_post_norm": "post_ffw_norm",
    "sinks": "attn_sinks",
    "o_norm": "attn_sub_norm",
    "down_norm": "ffn_sub_norm",
    "xielu_positive": "xielu_alpha_p",
    "xielu_negative": "xielu_alpha_n",
    "xielu_beta": "xielu_beta",
    "xielu_eps": "xielu_eps",
    "q_a": "attn_q_a",
    "q_a_norm": "attn_q_a_norm",
    "q_b": "attn_q_b",
    "kv_a": "attn_kv_a_mqa",
    "kv_a_norm": "attn_kv_a_norm",
    "kv_b": "attn_kv_b",
    "k_b": "attn_k_b",
    "v_b": "attn_v_b",
    "conv_in": "shortconv.in_proj",
    "conv": "shortconv.conv",
    "conv_out": "shortconv.out_proj",
    "pooled_index_qk": "indexer.qk_proj",
    "q_gate": "attn_q",
    "attn_gate": "attn_gate",
    "head_gate": "attn_gate",
    "delta_qkv": "attn_qkv",
    "delta_z": "attn_gate",
    "delta_qkvz": "ssm_in",
    "delta_b": "ssm_beta",
    "delta_a": "ssm_alpha",
    "delta_ba": "ssm_ba",
    "delta_q": "attn_q",
    "delta_k": "attn_k",
    "delta_v": "attn_v",
    "delta_a_down": "ssm_f_a",
    "delta_a_up": "ssm_f_b",
    "delta_z_down": "ssm_g_a",
    "delta_z_up": "ssm_g_b",
    "delta_conv_q": "ssm_conv1d_q",
    "delta_conv_k": "ssm_conv1d_k",
    "delta_conv_v": "ssm_conv1d_v",
    "delta_conv": "ssm_conv1d",
    "delta_decay": "ssm_a",
    "delta_bias": "ssm_dt",
    "delta_scale": "ssm_norm",
    "delta_out": "ssm_out",
    "scan_in": "ssm_in",
    "scan_conv": "ssm_conv1d",
    "scan_decay": "ssm_a",
    "scan_skip": "ssm_d",
    "scan_bias": "ssm_dt",
    "scan_scale": "ssm_norm",
    "scan_out": "ssm_out",
    "lightning_qkv": "attn_qkv",
    "lightning_gate": "attn_gate",
    "lightning_norm": "attn_norm_2",
    "lightning_out": "attn_output",
    "channel_in": "ssm_in",
    "channel_conv": "ssm_conv1d",
    "channel_read": "ssm_x",
    "channel_steps": "ssm_dt",
    "channel_decay": "ssm_a",
    "channel_skip": "ssm_d",
    "channel_dt_scale": "ssm_dt_norm",
    "channel_b_scale": "ssm_b_norm",
    "channel_c_scale": "ssm_c_norm",
    "channel_out": "ssm_out",
    "turn_start": "hrm.z_l_init",
    "router": "ffn_gate_inp",
    "router_bias": "exp_probs_b",
    "router_scale": "ffn_gate_inp.scale",
    "expert_scale": "ffn_down_exps.scale",
    "expert_gate": "ffn_gate_exps.{}",
    "expert_up": "ffn_up_exps.{}",
    "expert_down": "ffn_down_exps.{}",
    "expert_enter": "ffn_latent_down",
    "expert_leave": "ffn_latent_up",
    "shared_switch": "ffn_gate_inp_shexp",
    "shared_gate": "ffn_gate_shexp",
    "shared_up": "ffn_up_shexp",
    "shared_down": "ffn_down_shexp",
}
"""Role -> name, the same for almost every architecture. A fused gate and up is called up."""
BIASES = ("router_bias", "delta_bias", "scan_bias")
"""Roles whose one tensor the format calls a bias."""
PARTED = {
    "delta_qkvz": ("delta_qkv", "delta_z"),
    "shared_gate_up": ("shared_gate", "shared_up"),
    "kv_b": ("k_b", "v_b"),
    "pooled_index_qk": ("pooled_index_q", "pooled_index_k"),
}
"""Matrices of folders -> what is in their place; older files have them as they are."""
NAKED = ("delta_decay", "scan_decay", "scan_skip", "channel_decay", "channel_skip")
"""Roles whose one tensor has the name of the role alone."""
REWRITES = (
    Rewrite(r"(blk\.\d+\.ffn_(?:gate|up|down)_exps)\.(\w+)", r"\1.{}.\2", stacked=True),
    Rewrite(r"(blk\.\d+)\.ffn_gate_up_exps\.(\w+)", r"\1.ffn_{1}_exps.{0}.\2", stacked=True, parts=("gate", "up")),
    *(Rewrite(rf"(blk\.\d+\.{name})\.bias", r"\1.weight") for name in sorted({NAMES[role] for role in BIASES})),
    *(Rewrite(rf"(blk\.\d+\.{name})", r"\1.weight") for name in sorted({NAMES[role] for role in NAKED})),
)
"""A layer's experts lie in one tensor for each matrix; newer files may have gate and up in one."""
FIELDS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "num_dense_layers": "leading_dense_block_count",
    "conv_L_cache": "shortconv.l_cache",
}
"""Field of config.json -> key under the architecture's name. Families spell the number of experts in two ways."""
DELTA_FIELDS = {
    "full_attention_interval": "full_attention_interval",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
"""Fields of the gated delta rule."""
INNER = "ssm.inner_size"
"""Numbers of all heads that scan, or of all value heads of the gated delta rule."""
NORMED = "ssm.dt_b_c_rms"
"""Whether B, C and time steps are normed."""
RECURRENT = "attention.recurrent_layers"
NEXTN = "nextn_predict_layers"
"""Layers behind the model's own, which predict further tokens."""
KEY_LENGTHS = ("attention.key_length", "attention.key_length_swa")
VALUE_LENGTHS = ("attention.value_length", "attention.value_length_swa")
TURNED = ("rope.dimension_count", "rope.dimension_count_swa")
"""Numbers of a head's key and value and those that turn; of a head in layers with a window, where these differ."""
LATENT_LENGTHS = ("attention.key_length_mla", "attention.value_length_mla")
"""Numbers of a head's key and value where the other keys say those of latents."""
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
"""A tenth of `mscale_all_dim`."""
TEMPERATURE = "attention.temperature_scale"
"""By how much queries grow with the logarithm of how often a length has passed."""
GATING = "expert_gating_func"
"""The function by which experts are scored."""
SOFTMAX, SIGMOID = 1, 2
"""Of these functions."""
SCORES = {"softmax": SOFTMAX, "sigmoid": SIGMOID}
MULTIPLIERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
"""Fields of what is multiplied in a Granite."""
REALS = frozenset({
    *MULTIPLIERS.values(), "attention.clamp_kqv", "attention.max_alibi_bias", "attention.value_scale", TEMPERATURE,
    "attn_logit_softcapping", "final_logit_softcapping", "expert_weights_scale", "rope.freq_base",
    "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.scaling.factor", LOG_MULTIPLIER,
})  # fmt: skip
"""Keys of numbers that are real, which llama.cpp reads as nothing else; config.json may have them as whole numbers."""
ONE_BELOW_OTHER = tuple(f".{NAMES[role]}.weight" for role in ("k_b", "v_b", "delta_conv_q", "delta_conv_k",
                                                              "delta_conv_v"))  # fmt: skip
"""Matrices with further axes, of heads or of one: all rows lie below each other."""
KV_HEADS = "num_key_value_heads"
WIDTH = "intermediate_size"
ROPE_FIELDS = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
YARN_FACTOR = "rope.scaling.yarn_attn_factor"
"""What newer files call the factor of cosines."""
CAUSAL = "attention.causal"
POOLED = ("pooling_type", "classifier.pooling_type", "classifier.output_labels")
"""How rows become a vector, how they do before classes, and what the classes are called."""
TYPES_OF_TOKENS = "tokenizer.ggml.token_type_count"
WINDOW = ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa")
READ_BELOW = frozenset({
    "vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.type", CAUSAL,
    "rope.scaling.finetuned", YARN_FACTOR, "tensor_data_layout", *POOLED, *FIELDS.values(), *ROPE_FIELDS.values(),
})  # fmt: skip
"""Keys that are read for every architecture, or change nothing; any other may be a feature that is not here."""
STILL = 1e30
"""The factor of frequencies that do not turn."""
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
