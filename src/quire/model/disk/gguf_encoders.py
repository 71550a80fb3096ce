"""GGUF's architectures of an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.hf_config import HfConfig
from quire.model.families.readers import decoder_start

PARTS = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_o",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
"""Role of a layer of either stack -> name."""
NAMES = {
    "layer": "dec.blk.{}.",
    "encoder_layer": "enc.blk.{}.",
    "final_norm": "dec.output_norm",
    "encoder_final_norm": "enc.output_norm",
    "relative_bias": "dec.blk.0.attn_rel_b",
    "encoder_relative_bias": "enc.blk.0.attn_rel_b",
    **PARTS,
    **{f"encoder_{role}": name for role, name in PARTS.items()},
    "cross_norm": "cross_attn_norm",
    **{f"cross_{role}": f"cross_attn_{role}" for role in "qkvo"},
}


def mlp_of_t5(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """The MLP of version 1.1 has a gate, that of 1.0 a relu."""
    return {"feed_forward_proj": "gated-gelu" if has(".ffn_gate.") else "relu"}


def start_of_t5(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The token that a decoder begins with, which llama.cpp knows by the key alone."""
    return {"decoder_start_token_id": decoder_start(HfConfig(dict(raw), ""))}


ENCODERS: dict[str, Architecture] = {
    "t5": Architecture(
        "t5",
        names=NAMES,
        fields={
            "num_layers": "block_count",
            "num_decoder_layers": "decoder_block_count",
            "relative_attention_num_buckets": "attention.relative_buckets_count",
            "decoder_start_token_id": "decoder_start_token_id",
        },
        spelling=(("rms_norm_eps", "layer_norm_epsilon"), ("max_position_embeddings", "n_positions")),
        further=mlp_of_t5,
        tell=start_of_t5,
        skipped=("dec.blk.0.cross_attn_rel_b.",),
        also=("mt5",),
    ),
}
