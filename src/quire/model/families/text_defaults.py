"""Fields that the config of a decoder inside a larger model may leave out, and what transformers then takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _sizes(hidden: int, layers: int, heads: int, width: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": width,
        "vocab_size": vocabulary,
    } | more


_GRANITE = _sizes(4096, 32, 32, 11008, 32000)
USUAL: Mapping[str, Mapping[str, Any]] = {
    "aria_text": _sizes(4096, 32, 32, 4096, 32000, max_position_embeddings=2048),
    "cohere2": _sizes(8192, 40, 64, 22528, 256000),
    "dots3_note_text": _sizes(5120, 46, 128, 13824, 152064),
    "deepseek_v3": _sizes(7168, 61, 128, 18432, 129280),
    "emu3_text_model": _sizes(4096, 32, 32, 14336, 184622, num_key_value_heads=8, max_position_embeddings=9216,
                              rms_norm_eps=1e-5, rope_theta=1e6),
    "ernie4_5_vl_moe_text": _sizes(2560, 28, 20, 12288, 103424),
    "exaone4": _sizes(4096, 32, 32, 16384, 102400),
    "gemma": _sizes(3072, 28, 16, 24576, 256000),
    "gemma4_text": _sizes(2304, 30, 8, 9216, 262144),
    "gemma4_unified_text": _sizes(2304, 30, 8, 9216, 262144, max_position_embeddings=262144,
                                  use_bidirectional_attention="vision"),
    "glm4v_moe_text": _sizes(4096, 46, 96, 10944, 151424, max_position_embeddings=65536, attention_bias=True),
    "glm4v_text": _sizes(4096, 40, 32, 13696, 151552),
    "glm_ocr_text": _sizes(1024, 16, 16, 4096, 59392, num_key_value_heads=8, max_position_embeddings=131072),
    "granite": _GRANITE,
    "granite4_vision_text": _GRANITE,
    "granite_docling_text": _sizes(1024, 28, 16, 2048, 133800, num_key_value_heads=4, max_position_embeddings=32768,
                                   rms_norm_eps=1e-5, embedding_multiplier=12.0, logits_scaling=4.0,
                                   residual_multiplier=0.263, attention_multiplier=0.015625),
    "llama4_text": _sizes(5120, 48, 40, 8192, 202048),
    "mllama_text_model": _sizes(4096, 40, 32, 14336, 128256),
    "muse_glimmer_text": _sizes(6656, 52, 32, 19968, 202048, eos_token_id=200001, bos_token_id=200000),
    "paddleocr_vl_text": _sizes(1024, 18, 16, 3072, 103424, head_dim=128),
    "qwen2_5_omni_text": _sizes(3584, 28, 28, 18944, 152064, num_key_value_heads=4, rope_theta=1e6,
                                max_position_embeddings=32768),
    "qwen3": _sizes(4096, 32, 32, 22016, 151936, num_key_value_heads=32),
    "qwen3_omni_moe_text": _sizes(2048, 28, 28, 18944, 3584, num_key_value_heads=4, rope_theta=1e6,
                                  norm_topk_prob=True),
}  # fmt: skip
"""By the decoder's model type."""
