"""Tiny dense decoders beside those of `paged_model`: name -> transformers' model type and facts of its config."""

from __future__ import annotations

from typing import Any

PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
GROWN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 8, "mscale": 1.0,
         "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}  # fmt: skip
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
FOUR = {"num_hidden_layers": 4, "sliding_window": 5}
MUP = {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "attention_multiplier": 0.3}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "cwm": ("cwm", FOUR | {"head_dim": 24}),
    "ministral3": ("ministral3", {"head_dim": 24, "rope_parameters": GROWN}),
    "ministral3_window": ("ministral3", {"head_dim": 16, "sliding_window": 5, "rope_parameters": GROWN | {
        "original_max_position_embeddings": 4, "factor": 32.0}}),
    "jais2": ("jais2", {}),
    "jais2_plain": ("jais2", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}),
    "iquestcoder": ("iquestcoder", {"head_dim": 16}),
    "hyperclovax": ("hyperclovax", MUP | {"logits_scaling": 0.125}),
    "hyperclovax_pre_norms": ("hyperclovax", MUP | {"use_post_norm": False, "attention_multiplier": None}),
    "granite_swa": ("granite_swa", FOUR | MUP | {"logits_scaling": 8.0}),
    "granite_swa_thetas": ("granite_swa", FOUR | {"layer_rope_theta": [0, 1e4, 5e5, 0]}),
    "codegen": ("codegen", {"rotary_dim": 8}),
    "gpt_neox_japanese": ("gpt_neox_japanese", {}),
    "biogpt": ("biogpt", {}),
    "openai_gpt": ("openai-gpt", {}),
    "apertus": ("apertus", PLAIN_ROPE | {"head_dim": 24}),
    "apertus_relu2": ("apertus", PLAIN_ROPE | {"hidden_act": "relu2", "attention_bias": True}),
    "nanochat": ("nanochat", {}),
    "nanochat_biases": ("nanochat", {"attention_bias": True, "tie_word_embeddings": True,
                                     "final_logit_softcapping": 0.7}),
    "bitnet": ("bitnet", {}),
    "bitnet_biases": ("bitnet", {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "cohere_compass": ("cohere_compass_text", FOUR | {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "logit_scale": 0.3,
        "rope_parameters": {"sliding_attention": SECTIONS, "full_attention": None}}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 24, "rope_parameters": ALPHA}),
    "hunyuan_biases": ("hunyuan_v1_dense", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "persimmon": ("persimmon", {}),
    "persimmon_no_norms": ("persimmon", {"qk_layernorm": False}),
    "xglm": ("xglm", {"ffn_dim": 96}),
    "ctrl": ("ctrl", {"dff": 96}),
    "ctrl_untied": ("ctrl", {"dff": 96, "tie_word_embeddings": False}),
    "modernbert_decoder": ("modernbert-decoder", {"local_attention": 10, "num_hidden_layers": 4, "norm_bias": True,
                           "classifier_activation": "silu", "classifier_bias": True}),
    "modernbert_decoder_untied": ("modernbert-decoder", {"local_attention": 6, "tie_word_embeddings": False,
                                  "attention_bias": True, "mlp_bias": True, "global_attn_every_n_layers": 2}),
}  # fmt: skip
SHARED_DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "norms inside attention and the MLP": ("bitnet", {}),
    "norms of turned heads": ("hunyuan_v1_dense", {"head_dim": 16}),
    "layernorms of heads": ("persimmon", {}),
    "a tied head with a bias": ("ctrl", {"dff": 96, "vocab_size": 101}),
    "learned numbers of an activation": ("apertus", PLAIN_ROPE),
    "a layer before the head": ("modernbert-decoder", {"local_attention": 10}),
    "pieces of queries, values and keys": ("codegen", {"rotary_dim": 8}),
}
"""Models whose parts ranks share."""
