"""Rows of families that hear: an encoder of sound, and a decoder that writes what was said."""

from __future__ import annotations

from quire.model.disk.hf_config import HfConfig
from quire.model.encoder_sizes import EncoderStack
from quire.model.families.readers import decoder_start, no_rope
from quire.model.families.row import Family, Reader

_LAYER = {
    "attn_norm": "self_attn_layer_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "up": "fc1",
    "down": "fc2",
}
WHISPER = {
    "embed": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "final_norm": "model.decoder.layer_norm",
    "head": "proj_out",
    "layer": "model.decoder.layers.{}.",
    **_LAYER,
    "cross_norm": "encoder_attn_layer_norm",
    "cross_q": "encoder_attn.q_proj",
    "cross_k": "encoder_attn.k_proj",
    "cross_v": "encoder_attn.v_proj",
    "cross_o": "encoder_attn.out_proj",
    "encoder_conv1": "model.encoder.conv1",
    "encoder_conv2": "model.encoder.conv2",
    "encoder_positions": "model.encoder.embed_positions",
    "encoder_final_norm": "model.encoder.layer_norm",
    "encoder_layer": "model.encoder.layers.{}.",
    **{f"encoder_{role}": name for role, name in _LAYER.items()},
}
WHISPER_SPELLING = (
    ("hidden_size", "d_model"),
    ("intermediate_size", "decoder_ffn_dim"),
    ("num_attention_heads", "decoder_attention_heads"),
    ("num_hidden_layers", "decoder_layers"),
    ("max_position_embeddings", "max_target_positions"),
    ("hidden_act", "activation_function"),
)
WHISPER_DEFAULTS = {"d_model": 384, "decoder_ffn_dim": 1536, "encoder_ffn_dim": 1536, "decoder_attention_heads": 6,
                    "encoder_attention_heads": 6, "decoder_layers": 4, "encoder_layers": 4, "vocab_size": 51865,
                    "max_target_positions": 448, "max_source_positions": 1500, "num_mel_bins": 80,
                    "activation_function": "gelu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
                    "eos_token_id": 50256, "decoder_start_token_id": 50257}  # fmt: skip


def audio_stack(config: HfConfig, layers: int) -> EncoderStack:
    """Whisper's encoder, whose layers are as wide as the decoder's."""
    for name in ("ffn_dim", "attention_heads"):
        encoder, decoder = (config.integer(f"{stack}_{name}") for stack in ("encoder", "decoder"))
        if encoder != decoder:
            raise config.fail(f"encoder_{name}", f"is {encoder}, and the decoder's {decoder}; both must be alike")
    return EncoderStack(
        config.integer("encoder_layers", high=1024),
        start=decoder_start(config),
        rows=config.integer("max_source_positions", high=1 << 14),
        bins=config.integer("num_mel_bins", high=1 << 10),
    )


READS: dict[str, Reader] = {"rope": no_rope, "encoder": audio_stack}
SPEECH = {
    "whisper": Family(
        WHISPER,
        WHISPER_DEFAULTS,
        READS,
        ("positions", "encoder_conv1", "encoder_conv2", "encoder_positions", "encoder_final_norm"),
        facts={"join": "crossed", "norm": "layer"},
        spelling=WHISPER_SPELLING,
    ),
}
