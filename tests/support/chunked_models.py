"""Tiny models of Llama 4: attention in chunks, one expert a token, layers that rope does not turn."""

from __future__ import annotations

from typing import Any

LLAMA4 = {"head_dim": 16, "intermediate_size": 40, "intermediate_size_mlp": 96, "num_local_experts": 4,
          "attention_chunk_size": 6, "floor_scale": 4, "attn_scale": 0.7}  # fmt: skip
Variants = dict[str, tuple[str, dict[str, Any]]]
CHUNKED_MIXTURES: Variants = {
    "llama4": ("llama4_text", LLAMA4 | {"no_rope_layers": [1, 0, 1], "interleave_moe_layer_step": 2}),
    "llama4_every_layer": ("llama4_text", LLAMA4 | {"no_rope_layer_interval": 2, "use_qk_norm": False}),
    "llama4_biases": ("llama4_text", LLAMA4 | {"no_rope_layers": [0, 1, 1], "moe_layers": [0, 1],
                                               "attention_bias": True, "attn_temperature_tuning": False}),
}  # fmt: skip
CHUNKED: Variants = {"llama4": CHUNKED_MIXTURES["llama4"]}
