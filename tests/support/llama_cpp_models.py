"""Further models that are compared with llama.cpp, one for each architecture that it has beside those of hybrids."""

from __future__ import annotations

from typing import Any

MULTIPLIERS = {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
               "attention_multiplier": 0.3}  # fmt: skip
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "n_shared_experts": 1,
          "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}  # fmt: skip
ERNIE = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 256, "moe_num_shared_experts": 2,
         "moe_layer_start_index": 1, "tie_word_embeddings": False}  # fmt: skip
HEADS = {"head_dim": 64}
FOUR = {"sliding_window": 5, "num_hidden_layers": 4}
PLAIN = {"intermediate_size": 1024}
"""Of families whose MLP is four times as wide as the stream, whatever their files say."""
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granite", MULTIPLIERS),
    "command-r": ("cohere", {}),
    "cohere2": ("cohere2", FOUR),
    "glm4": ("glm4", HEADS),
    "chatglm": ("glm", HEADS),
    "olmo": ("olmo", {"clip_qkv": 0.4}),
    "olmo2": ("olmo2", {}),
    "olmo2 third": ("olmo3", FOUR),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "starcoder": ("gpt_bigcode", PLAIN),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "ernie4_5": ("ernie4_5", HEADS),
    "falcon": ("falcon", PLAIN),
    "falcon two norms": ("falcon", PLAIN | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt2": ("gpt2", PLAIN),
    "gptneox": ("gpt_neox", {}),
    "gptneox sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "bloom": ("bloom", PLAIN),
    "mpt": ("mpt", PLAIN),
    "stablelm": ("stablelm", {"use_parallel_residual": False, "use_qkv_bias": True}),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True}),
    "nemotron": ("nemotron", {}),
    "seed_oss": ("seed_oss", HEADS | {"attention_out_bias": False}),
    "arcee": ("arcee", {}),
    "glm4moe": ("glm4_moe", ROUTED | HEADS | {"use_qk_norm": True}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "dots1": ("dots1", ROUTED | HEADS | {"num_key_value_heads": 4}),
    "ernie4_5-moe": ("ernie4_5_moe", ERNIE | {"intermediate_size": 1024}),
}
LOCAL, FULL = "sliding_attention", "full_attention"
GEMMA4 = FOUR | HEADS | {"global_head_dim": 128, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
                         "layer_types": [LOCAL, FULL] * 2}  # fmt: skip
ROWS = {"vocab_size": 400, "vocab_size_per_layer_input": 400}
SHARING = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
GEMMA3N = (
    ROWS
    | HEADS
    | {
        "sliding_window": 5,
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 0,
        "layer_types": [LOCAL, LOCAL, FULL],
        "activation_sparsity_pattern": [0.95] * 3,
        "hidden_size_per_layer_input": 256,
    }
)
"""llama.cpp takes sizes of Gemma 3n's as those of its releases, cuts gates of the first ten layers at 0.95, and takes
the first twenty to have keys of their own."""
FURTHER |= {
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4 inputs": ("gemma4_text", GEMMA4 | ROWS | SHARING | {"hidden_size_per_layer_input": 64}),
    "gemma4 keys as values": ("gemma4_text", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4 experts": ("gemma4_text", GEMMA4 | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3,
                                                "moe_intermediate_size": 256, "attention_k_eq_v": True}),
    "gemma3n": ("gemma3n_text", GEMMA3N),
}  # fmt: skip
RELEASED: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "chatglm": {"layernorm_epsilon": 1.5625e-07, "seq_length": 128},
    "falcon": {"num_kv_heads": 1},
    "gpt2": {"n_ctx": 128},
    "gptneox": {"rotary_pct": 0.25},
    "gptneox sequential": {"rotary_pct": 0.25},
    "mpt": {"architectures": ["MPTForCausalLM"]},
    "dots1": {"scoring_func": "sigmoid"},
}
"""Fields of config.json as releases have them, or as transformers wrote them earlier."""
