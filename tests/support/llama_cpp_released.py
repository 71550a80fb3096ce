"""What releases have in config.json that transformers does not write, for the models of `gguf_written`."""

from __future__ import annotations

from typing import Any

import llama_cpp_models

NO_BIASES = "its code has no such biases, or needs them"
WINDOWS = "its code has no windows in models of so few layers, or none"
LAYERS = "its code tells such models by their number of layers"
OPEN = "its logits are others than ours, which are those of transformers; why is not known yet"
NOT_READ = {
    **dict.fromkeys(("mellum", "afmoe", "minimax-m3", "laguna", "laguna numbers"), OPEN),
    "exaone4 whole": LAYERS,
    "gptj": "llama.cpp has a name for it and no code",
    "command-r norms": LAYERS,
    "starcoder2": WINDOWS,
    "exaone4": WINDOWS,
    "llama ministral": WINDOWS,
    "starcoder2 plain": NO_BIASES,
    "ernie4_5 biases": NO_BIASES,
    "falcon biases": NO_BIASES,
    "gptneox sequential": NO_BIASES,
    "seed_oss biases": NO_BIASES,
    "arcee": NO_BIASES,
    "baichuan": LAYERS,
    "baichuan second": LAYERS,
    "deepseek2": LAYERS,
    "phimoe": "its code weighs the chosen experts by a softmax, not by sparsemixer",
    "deepseek2 groups": "its code counts a group by its best two experts, as V3 does",
    "ernie4_5-moe every second": "its code has experts in every layer from the first with any on",
    "t5": "the other side of this test feeds no decoder behind an encoder",
    "t5 gated": "the other side of this test feeds no decoder behind an encoder",
    "deepseek32": "its code ends at an assertion with these sizes of an indexer",
    "glm-dsa": "its code ends at an assertion with these sizes of an indexer",
}
"""Model -> why llama.cpp does not read its file, or computes otherwise than transformers."""
NO_NAME = "the converter has no such model"
SHARED_TWICE = "the converter and the reader disagree on the width of more than one shared expert"
NOT_CONVERTED: dict[str, str] = {
    "granite_swa turns": "the converter does not write which layers turn",
    "mistral4": "the converter does not write how queries grow with their position",
    "stablelm parallel": "the converter looks for the norms of heads under another name",
    "llama helium": NO_NAME,
    "llama internlm": NO_NAME,
    "ernie4_5-moe": SHARED_TWICE,
    "bailingmoe2": SHARED_TWICE,
    "kimi-linear": "transformers writes names that the converter does not know",
    "falcon-h1 tied": "the multiplier of a tied head is lost in its file",
}
"""Model -> why llama.cpp's converter makes no file of it."""
MIMO2 = {
    "hybrid_layer_pattern": [0, 1, 0, 1],
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 24,
    "swa_num_attention_heads": 4,
    "swa_v_head_dim": 16,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "partial_rotary_factor": 0.5,
    "rope_parameters": None,
    "rope_theta": 1e5,
    "swa_rope_theta": 1e3,
}
BLOCKS = {
    "sparse_num_index_heads": 2,
    "sparse_index_dim": 16,
    "sparse_block_size": 16,
    "sparse_topk_blocks": 2,
    "sparse_local_block": 1,
    "sparse_attention_freq": [0, 1, 1],
}
RELEASED: dict[str, dict[str, Any]] = llama_cpp_models.RELEASED | {
    "deepseek": {"architectures": ["DeepseekForCausalLM"]},
    "bailingmoe": {"architectures": ["BailingMoeForCausalLM"]},
    "bailingmoe2": {"architectures": ["BailingMoeV2ForCausalLM"], "score_function": "sigmoid"},
    "internlm2": {"architectures": ["InternLM2ForCausalLM"]},
    "baichuan": {"architectures": ["BaichuanForCausalLM"]},
    "baichuan second": {"architectures": ["BaichuanForCausalLM"]},
    "exaone": {"architectures": ["ExaoneForCausalLM"]},
    "minicpm": {"architectures": ["MiniCPMForCausalLM"]},
    "orion": {"architectures": ["OrionForCausalLM"]},
    "qwen": {"architectures": ["QWenLMHeadModel"]},
    "mistral4": {"architectures": ["Ministral3ForCausalLM"]},
    "hunyuan-moe": {
        "moe_topk": [3] * 3,
        "num_shared_expert": [1] * 3,
        "moe_intermediate_size": [96] * 3,
    },
    "mimo2": MIMO2,
    "minimax-m3": {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "sparse_attention_config": BLOCKS,
        "moe_layer_freq": [0, 1, 1],
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
    },
    "exaone-moe": {"scoring_func": "sigmoid"},
    "minimax-m2": {"scoring_func": "sigmoid"},
    "deepseek2 lite": {"scoring_func": "sigmoid"},
    "glm4moe without norms": {"partial_rotary_factor": 1.0, "scoring_func": "sigmoid"},
    "xverse": {"architectures": ["XverseForCausalLM"]},
    "chatglm published": {"architectures": ["ChatGLMModel"]},
    "gpt2 published": {"architectures": ["GPT2LMHeadModel"], "n_ctx": 128},
    "granitehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "deepseek2 third": {"scoring_func": "sigmoid"},
    "deepseek2 yarn": {"scoring_func": "sigmoid"},
    "deepseek2 fourth": {"architectures": ["DeepseekV3ForCausalLM"], "scoring_func": "sigmoid"},
    "mpt clipped": {"architectures": ["MPTForCausalLM"]},
}
