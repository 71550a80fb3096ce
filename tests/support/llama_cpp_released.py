"""What releases have in config.json that transformers does not write, for the models of `gguf_written`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama_cpp_models
from family_tensors import Tensors, as_step3p5, without_decays

NO_BIASES = "its code has no such biases, or needs them"
WINDOWS = "its code has no windows in models of so few layers, or none"
LAYERS = "its code tells such models by their number of layers"
SIZES = f"{LAYERS}: see those of 32 and 40"
RELEASES = "its code has the sizes of the releases, whatever a file says: see `gemma3n shared`"
NOT_READ = {
    "mellum": "its code turns layers with a window by the base of the others: see `mellum one base`",
    "minimax-m3": "its code attends to all blocks without flash attention, and with it rounds keys to f16 in layers "
    "that choose none: see `minimax-m3 all blocks` and `minimax-m3 sparse`",
    "qwen4exp one block": "its code reads as many tokens as blocks and the longest tail have, so where a tail is "
    "shorter also some of one block more",
    "gemma4 shared_keys": NO_BIASES,
    "gemma3n": RELEASES,
    "gemma3n sparse": RELEASES,
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
    "baichuan": SIZES,
    "baichuan second": SIZES,
    "deepseek2": LAYERS,
    "phimoe": "its code weighs the chosen experts by a softmax, not by sparsemixer: logits up to 3.0 are 1.4 off",
    "deepseek2 groups": "its code counts a group by its best two experts, as V3 does",
    "ernie4_5-moe every second": "its code has experts in every layer from the first with any on",
}
"""Model -> why llama.cpp does not read its file, or computes otherwise than transformers."""
LOUDER = {"t5": 8.0}
"""Model -> by what its logits exceed ours: its code does not divide those of a tied head by the root of the width."""
FLASH = ("minimax-m3 sparse",)
"""Models that choose blocks of keys with flash attention alone."""
NO_NAME = "the converter has no such model"
SHARED_TWICE = "the converter and the reader disagree on the width of more than one shared expert"
UNCAPPED = "the converter writes no key where nothing caps logits, and llama.cpp caps them then"
ENDLESS = "the converter's code for them calls itself without end on every tensor but the fused one"
FOUR_BITS = "the converter takes experts in fp4 with scales alone: KeyError('Missing routed expert tensors ...')"
NOT_CONVERTED: dict[str, str] = {
    "baichuan seven": ENDLESS,
    "baichuan thirteen": ENDLESS,
    "gemma4 windows": UNCAPPED,
    "gemma4 small_windows": UNCAPPED,
    "granite_swa turns": "the converter does not write which layers turn",
    "mistral4": "the converter does not write how queries grow with their position",
    "stablelm parallel": "the converter looks for the norms of heads under another name",
    "llama helium": NO_NAME,
    "llama internlm": NO_NAME,
    "ernie4_5-moe": SHARED_TWICE,
    "bailingmoe2": SHARED_TWICE,
    "kimi-linear": "transformers writes names that the converter does not know",
    "falcon-h1 tied": "the multiplier of a tied head is lost in its file",
    **dict.fromkeys(("deepseek4", "deepseek4 yarn", "deepseek4 yarn last"), FOUR_BITS),
    "hy_v4": "the converter leaves rows of heads as they lie, and llama.cpp turns neighbours, not halves",
    "plamo": "the converter knows the sizes of one release alone, and asserts matrices of 5120 rows and columns",
    "minimax-01": "the converter does not write which layers attend, and readers take every eighth",
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
MINIMAX_M3 = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "sparse_attention_config": BLOCKS,
    "moe_layer_freq": [0, 1, 1],
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
}
STEP35 = {
    "rope_parameters": None,
    "rope_theta": [1e5, 1e3, 1e3, 1e5],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
    "num_attention_groups": 2,
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 8, "head_dim": 16,
                                "num_attention_groups": 2},
    "moe_layers_enum": "1,2,3",
    "moe_num_experts": 8,
    "moe_top_k": 3,
    "norm_expert_weight": True,
}  # fmt: skip
SCALED = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
LING3 = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "no_kda_lora": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "head_dim": 16,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "max_position_embeddings": 128,
    "moe_shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
}
DOTS3 = {
    "architectures": ["Dots3NoteForCausalLM"],
    "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
    "per_layer_config": None,
    "rope_parameters": None,
    "rope_theta": 8e7,
    "swa_rope_theta": 5e4,
    "use_dsa": True,
    "apply_mla_qkv_lora_rescale": True,
    "scoring_func": "sigmoid",
    "sliding_window_size": 5,
    "first_k_dense_replace": 1,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 8,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 64,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 24,
    "swa_qk_rope_head_dim": 8,
    "swa_v_head_dim": 16,
}
ATTENDS = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
MINIMAX_01 = {
    "architectures": ["MiniMaxText01ForCausalLM"],
    "rotary_dim": 16,
    **{f"layernorm_{part}_alpha": 3.5 for part in ("full_attention", "linear_attention", "mlp")},
    **{f"layernorm_{part}_beta": 1.0 for part in ("full_attention", "linear_attention", "mlp")},
}
GLM5 = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "mla_use_nope": True,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "linear_attn_config": {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0},
}
RELEASED: dict[str, dict[str, Any]] = llama_cpp_models.RELEASED | {
    "deepseek": {"architectures": ["DeepseekForCausalLM"]},
    "bailingmoe": {"architectures": ["BailingMoeForCausalLM"]},
    "bailingmoe2": {"architectures": ["BailingMoeV2ForCausalLM"], "score_function": "sigmoid"},
    "bailingmoe2 one": {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "score_function": "sigmoid",
        "num_nextn_predict_layers": 0,
    },
    "internlm2": {"architectures": ["InternLM2ForCausalLM"]},
    "baichuan": {"architectures": ["BaichuanForCausalLM"]},
    "baichuan second": {"architectures": ["BaichuanForCausalLM"]},
    "exaone": {"architectures": ["ExaoneForCausalLM"], "rms_norm_eps": 1e-3},
    "minicpm": {"architectures": ["MiniCPMForCausalLM"]},
    "orion": {"architectures": ["OrionForCausalLM"]},
    "qwen": {"architectures": ["QWenLMHeadModel"], "rms_norm_eps": 1e-3},
    "mistral4": {"architectures": ["Ministral3ForCausalLM"]},
    "nemotron_h": {
        "layers_block_type": None,
        "n_group": None,
        "topk_group": None,
        "rms_norm_eps": 1e-5,
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M-*M",
        "num_experts_per_tok": None,
        "n_routed_experts": None,
    },
    "mistral4 near": {"architectures": ["Ministral3ForCausalLM"]},
    "hunyuan-moe": {
        "moe_topk": [3] * 3,
        "num_shared_expert": [1] * 3,
        "moe_intermediate_size": [96] * 3,
    },
    "mimo2": MIMO2,
    "step35": STEP35,
    "step35 scaled": STEP35 | {"rope_theta": [1e4, 1e3, 1e3, 1e4], "rope_parameters": SCALED},
    "bailingmoe3": LING3,
    "dots3note": DOTS3,
    "glm5-next": GLM5,
    "glm5-next unbounded": GLM5
    | {"linear_attn_config": {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4, "safe_gate": False}},
    "qwen4exp": ATTENDS,
    "qwen4exp no n-grams": ATTENDS,
    "minimax-01 eighth": MINIMAX_01,
    "muse-glimmer": {"architectures": ["MuseGlimmerForConditionalGeneration"]},
    "minimax-m3 all blocks": MINIMAX_M3 | {"sparse_attention_config": BLOCKS | {"sparse_topk_blocks": 3}},
    "minimax-m3 sparse": MINIMAX_M3 | {"moe_layer_freq": [1, 1, 1]},
    "afmoe": {"route_norm": True, "score_func": "sigmoid"},
    "t5": {"decoder_start_token_id": 1},
    "t5 gated": {"decoder_start_token_id": 1},
    "deepseek32": {"scoring_func": "sigmoid"},
    "laguna numbers": {"sliding_window": 0},
    "cohere2moe": {"prefix_dense_intermediate_size": 96},
    "gemma4 unified": {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "moe_intermediate_size": None,
        "num_kv_shared_layers": 0,
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
"""Fields of config.json as releases have them; the epsilon of those that say `layer_norm_epsilon` is also under the
name that the converter looks for, without which llama.cpp refuses the file."""


def as_minimax_m3(tensors: Tensors) -> Tensors:
    """The tensors under the names of the release: experts one by one, gate beside up, and no module that chooses."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        called = name.replace(".indexer.", ".index_")
        for part in ("gate.", "experts.", "shared_experts."):
            called = called.replace(f".mlp.{part}", f".block_sparse_moe.{part}")
        called = called.replace("gate.e_score", "e_score")
        prefix, _, matrix = called.rpartition("_moe.experts.")
        if matrix == "down_proj":
            found |= {f"{prefix}_moe.experts.{e}.w2.weight": one for e, one in enumerate(tensor)}
        elif prefix:
            for e, one in enumerate(tensor):
                for part, half in zip("13", one.chunk(2), strict=True):
                    found[f"{prefix}_moe.experts.{e}.w{part}.weight"] = half
        elif "gate_up_proj" in called:
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                found[called.replace("gate_up_proj", f"{part}_proj")] = half
        else:
            found[called] = tensor
    return found


def as_gemma3n(tensors: Tensors) -> Tensors:
    """The tensors with matrices of keys and values in all layers, also where none reads them."""
    first, last = "model.layers.0.self_attn.", "model.layers.{}.self_attn."
    own = [name.removeprefix(first) for name in tensors if name.startswith((f"{first}k_", f"{first}v_"))]
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    return {last.format(i) + part: tensors[first + part].clone() for part in own for i in range(layers)} | tensors


def as_bitnet(tensors: Tensors) -> Tensors:
    """The tensors under the names of the first release."""
    return {name.replace("self_attn.attn_sub_norm", "self_attn.inner_attn_ln").replace("mlp.ffn_sub_norm",
            "mlp.ffn_layernorm"): tensor for name, tensor in tensors.items()}  # fmt: skip


TENSORS: dict[str, Callable[[Tensors], Tensors]] = {
    "bitnet": as_bitnet,
    "step35": as_step3p5,
    "step35 scaled": as_step3p5,
    "minimax-01 eighth": without_decays,
    "gemma3n shared": as_gemma3n,
    "minimax-m3 all blocks": as_minimax_m3,
    "minimax-m3 sparse": as_minimax_m3,
}
"""Model -> how its release has the tensors that transformers writes otherwise."""
