"""Fields of config.json that files may leave out or call otherwise mean what transformers' configs make of them."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from quire.model.families.find import read_spec

DEEPSEEK = {
    "model_type": "deepseek_v4", "vocab_size": 99, "hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 64,
    "num_hidden_layers": 4, "num_attention_heads": 8, "q_lora_rank": 32, "o_lora_rank": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "index_head_dim": 32, "index_n_heads": 2, "index_topk": 8, "sliding_window": 16,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
GLM = {
    "model_type": "glm5_next_text", "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16,
    "qk_nope_head_dim": 16, "index_topk": 32, "index_head_dim": 16, "index_n_heads": 2, "linear_head_dim": 16,
    "linear_num_heads": 4,
}  # fmt: skip
QWEN = {
    "model_type": "qwen4_exp_text", "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 16,
    "num_attention_heads": 4, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
    "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4, "eos_token_id": 2,
}  # fmt: skip
DOTS = {
    "model_type": "dots3_note_text", "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "head_dim": 32, "index_topk": 32, "index_head_dim": 16,
    "index_n_heads": 2, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 48, "swa_head_dim": 48, "swa_qk_nope_head_dim": 32, "swa_v_head_dim": 16,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
HRM = {"model_type": "hrm_text", "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
       "num_attention_heads": 4, "head_dim": 16}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("DeepseekV4", DEEPSEEK),
    "deepseek rates": ("DeepseekV4", DEEPSEEK | {"compress_rate_csa": 2, "compress_rate_hca": 8}),
    "deepseek one rate": ("DeepseekV4", DEEPSEEK | {"compress_rate_hca": 16}),
    "deepseek ratios": ("DeepseekV4", DEEPSEEK | {"compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 1}),
    "deepseek turned": ("DeepseekV4", DEEPSEEK | {"qk_rope_head_dim": 16}),
    "deepseek yarn": ("DeepseekV4", DEEPSEEK | {"rope_scaling": YARN, "max_position_embeddings": 8192}),
    "glm": ("Glm5NextText", GLM),
    "glm unbounded": ("Glm5NextText", GLM | {"linear_lower_bound": None}),
    "glm bound": ("Glm5NextText", GLM | {"linear_lower_bound": -3.0}),
    "glm release": ("Glm5NextText", GLM | {"linear_attn_config": {"head_dim": 32, "num_heads": 2}}),
    "glm release unsafe": ("Glm5NextText", GLM | {"linear_attn_config": {"safe_gate": False}}),
    "glm release null": ("Glm5NextText", GLM | {"linear_attn_config": {"gate_lower_bound": None}}),
    "glm release null unsafe": (
        "Glm5NextText", GLM | {"linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}}),
    "qwen": ("Qwen4ExpText", QWEN),
    "qwen n-grams": ("Qwen4ExpText", QWEN | {"ple_layer_ids": [2], "ngram_vocab_size_base": 50}),
    "qwen interval": ("Qwen4ExpText", QWEN | {"full_attention_interval": 2, "output_gate_type": "sigmoid"}),
    "dots": ("Dots3NoteText", DOTS),
    "dots all": ("Dots3NoteText", DOTS | {"use_dsa": False, "sliding_window_size": 20, "moe_layer_freq": 2}),
    "dots whole": ("Dots3NoteText", DOTS | {"use_sliding_window": False, "first_k_dense_replace": 2}),
    "dots bases": ("Dots3NoteText", DOTS | {"rope_theta": 1e4, "swa_rope_theta": 1e3}),
    "hrm": ("HrmText", HRM),
    "hrm turns": ("HrmText", HRM | {"H_cycles": 1, "L_cycles": 2, "initializer_range": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_fields_are_read_as_transformers_does(name: str) -> None:
    family, raw = CASES[name]
    whole = getattr(transformers, f"{family}Config")(**{k: v for k, v in raw.items() if k != "model_type"}).to_dict()
    assert read_spec(raw, "config.json")[0] == read_spec(whole, "config.json")[0]
