"""Shapes of real models, most with a 32,000 vocabulary: folders with random weights and a made-up tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = COMMON | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LFM2: dict[str, Any] = COMMON | {
    "model_type": "lfm2",
    "max_position_embeddings": 8192,
    "rope_theta": 1e6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
}
QWEN3_5: dict[str, Any] = COMMON | {
    "model_type": "qwen3_5_text",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
}
GRANITE_4: dict[str, Any] = COMMON | {
    "model_type": "granitemoehybrid",
    "max_position_embeddings": 8192,
    "position_embedding_type": "nope",
    "embedding_multiplier": 12,
    "attention_multiplier": 0.0078125,
    "residual_multiplier": 0.22,
    "logits_scaling": 6,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
}
FIFTH = [*["sliding_attention"] * 4, "full_attention"]
GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "sliding_window": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "hidden_size_per_layer_input": 256,
    "use_double_wide_mlp": True,
}
"""The small ones, which have per-layer embeddings: a table of as many rows as there are tokens."""
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": COMMON
    | {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "head_dim": 64,
    },
    "llama-8b": COMMON
    | {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
    },
    "smollm-135m": COMMON
    | {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "head_dim": 64,
    },
    "qwen-0.6b": COMMON
    | {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "head_dim": 128,
    },
    # Fewer layers than the models have, so that two engines' weights fit into memory.
    "qwen-30b-a3b": EXPERTS
    | {
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "head_dim": 128,
        "num_experts": 128,
        "moe_intermediate_size": 768,
    },
    "olmoe-like": EXPERTS
    | {
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 1024,
        "head_dim": 128,
        "num_experts": 64,
        "moe_intermediate_size": 1024,
    },
    "lfm2-1.2b": LFM2
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
    },
    "qwen3.5-0.8b": QWEN3_5
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 3584,
        "linear_num_value_heads": 16,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
    },
    "qwen3.5-4b": QWEN3_5
    | {
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 9216,
        "linear_num_value_heads": 32,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
    },
    "granite-4-h-tiny": GRANITE_4
    | {
        "hidden_size": 1536,
        "num_hidden_layers": 40,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "mamba_n_heads": 48,
        "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    },
    "gemma-4-e2b": GEMMA_4
    | {
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "hidden_size": 1536,
        "num_hidden_layers": 35,
        "num_kv_shared_layers": 20,
        "head_dim": 256,
        "global_head_dim": 512,
        "intermediate_size": 6144,
        "layer_types": FIFTH * 7,
    },
    "tiny-gemma-4": GEMMA_4
    | {
        "vocab_size": 32000,
        "vocab_size_per_layer_input": 32000,
        "hidden_size": 256,
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 5,
        "head_dim": 64,
        "global_head_dim": 128,
        "intermediate_size": 512,
        "layer_types": FIFTH * 2,
    },
    "tiny-moe": EXPERTS
    | {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "head_dim": 32,
        "num_experts": 32,
        "moe_intermediate_size": 256,
    },
    "micro": COMMON
    | {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "head_dim": 16,
        "vocab_size": 320,
    },
    "tiny": COMMON
    | {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 768,
        "head_dim": 32,
    },
}

SHAPES["llama-1b-32k"] = SHAPES["llama-1b"] | {"max_position_embeddings": 32768}

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
}
CONVERTED = frozenset({"lfm2", "qwen3_5_text", "granitemoehybrid", "gemma4_text"})
"""Model types whose GGUF files llama.cpp's converter writes from a checkpoint: their layers are not those of `MATRICES`
below."""
SLOW = -3.0
"""What `A_log` is filled with: a state keeps about 0.94 of itself a token, so that no number of it becomes denormal."""

# Every matrix of a layer: name in GGUF, name in the checkpoint.
MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def shape_of(name: str, c: dict[str, Any]) -> tuple[int, int]:
    """(rows, columns) of a layer's matrix."""
    hidden, wide, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    return {
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        "ffn_gate": (wide, hidden),
        "ffn_up": (wide, hidden),
        "ffn_down": (hidden, wide),
    }[name]


def expert_shapes(c: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """(experts, rows, columns) of what lies in the place of a layer's ffn_ matrices, by the name in GGUF."""
    experts, wide, hidden = c["num_experts"], c["moe_intermediate_size"], c["hidden_size"]
    up, down = (experts, wide, hidden), (experts, hidden, wide)
    return {"ffn_gate_exps": up, "ffn_up_exps": up, "ffn_down_exps": down}


def vocabulary(size: int) -> list[str]:
    """The made-up pieces, by id: three special ones, a newline, and words that are their own number."""
    return ["<unk>", "<s>", "</s>", "<0x0A>", *(f"\u2581{i}" for i in range(4, size))]


def write_tokenizer(shape: str, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: each word is one token, so that every token of an answer is text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces = vocabulary(SHAPES[shape]["vocab_size"])
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"unk_token": pieces[0], "bos_token": pieces[1], "eos_token": pieces[2]}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | named
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_config(shape: str, folder: Path) -> Path:
    """A folder with a config.json and a tokenizer but no weights, for `load_format="dummy"`."""
    architecture = ARCHITECTURES[SHAPES[shape]["model_type"]]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | {"architectures": [architecture]}, indent=1))
    write_tokenizer(shape, folder)
    return folder


def write_checkpoint(shape: str, folder: Path) -> Path:
    """`write_config` and bf16 weights: normal numbers * 0.02, vectors 1 or `SLOW`; named by transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[shape]))
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        vector = SLOW if name.endswith(".A_log") else 1.0
        parameter.data.normal_(0, 0.02) if parameter.ndim > 1 else parameter.data.fill_(vector)
    for buffer in model.buffers():  # factors that files have
        buffer.fill_(1.0)
    model.tie_weights()
    model.save_pretrained(folder)
    return write_config(shape, folder)
