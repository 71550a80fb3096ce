"""Further rows of the family table: models that are another row's in other names, windows, biases or joins.

Families that transformers has no code for (InternLM2, Baichuan) follow their published modelling files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.families.names import (
    BIAS_FLAGS,
    GEMMA,
    GPT_NEO,
    INTERNLM2,
    LLAMA,
    MASKS,
    MLP_BIAS,
    NORM_BIASES,
    OLMO2,
    POST_NORMS,
    QKV_BIAS,
    without,
)
from quire.model.families.readers import (
    alibi_slopes,
    alternating,
    embed_scale,
    exaone4_kinds,
    four_times,
    gpt_neo_windows,
    no_rope,
    olmo3_rope,
    query_scale,
    window_rope,
)
from quire.model.families.row import Family, Reader, sliding_windows

ROW_NORMS = ("q_row_norm", "k_row_norm", *POST_NORMS)


def baichuan(config: HfConfig) -> Family:
    """7B turns positions by rope and gives `max_position_embeddings`; 13B, which does not, has ALiBi.

    The second generation (the one whose file has `z_loss_weight`) divides each row of its head by the row's length.
    """
    alibi = not config.has("max_position_embeddings")
    return Family(
        without(LLAMA, "q", "k", "v", "q_norm", "k_norm") | {"qkv": "self_attn.W_pack"},
        {"max_position_embeddings": 4096},
        {"rope": no_rope, "alibi": alibi_slopes} if alibi else {},
        facts={"unit_head": config.raw.get("z_loss_weight") is not None},
        spelling=(("max_position_embeddings", "model_max_length"),) if alibi else (),
    )


GEMMA2_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "layer_types": alternating(2),
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA2_READS: Mapping[str, Reader] = {
    "windows": sliding_windows,
    "embed_scale": embed_scale,
    "attention_scale": query_scale,
    "softcap": lambda config, layers: config.number("attn_logit_softcapping", 0.0),
    "output_softcap": lambda config, layers: config.number("final_logit_softcapping", 0.0),
}

RELATIVES: dict[str, Family | Callable[[HfConfig], Family]] = {
    "baichuan": baichuan,
    "internlm2": Family(
        INTERNLM2,
        {"max_position_embeddings": 2048},
        flags={"bias": ("qkv.bias", "o.bias")},
        grouped_qkv=True,
    ),
    "internlm3": Family(
        LLAMA,
        {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768},
        flags=BIAS_FLAGS | {"qkv_bias": QKV_BIAS, "bias": ("o.bias", *MLP_BIAS)},
    ),
    "ministral": Family(
        LLAMA,
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        {"windows": sliding_windows},
    ),
    "seed_oss": Family(
        LLAMA,
        {"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True, "max_position_embeddings": 524288},
        flags={"attention_bias": QKV_BIAS, "attention_out_bias": ("o.bias",), "mlp_bias": MLP_BIAS},
    ),
    "ernie4_5": Family(
        LLAMA,
        {
            "tie_word_embeddings": True,
            "head_dim": 128,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "max_position_embeddings": 131072,
        },
        flags={"use_bias": (*QKV_BIAS, "o.bias", *MLP_BIAS)},
        facts={"interleaved_rope": True},
    ),
    "helium": Family(
        LLAMA,
        {"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 1e5, "max_position_embeddings": 4096},
        flags={"attention_bias": QKV_BIAS, "mlp_bias": MLP_BIAS},
        facts={"interleaved_rope": True},
    ),
    "glm": Family(
        without(LLAMA, "gate", "up", "q_norm", "k_norm") | {"gate_up": "mlp.gate_up_proj"},
        {
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-7,
        },
        flags={"attention_bias": QKV_BIAS},
        facts={"interleaved_rope": True},
    ),
    "olmo3": Family(
        OLMO2,
        {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, "layer_types": alternating(4)},
        {"windows": sliding_windows, "rope": olmo3_rope},
        ROW_NORMS,
        BIAS_FLAGS,
        {"join": "post_norm"},
    ),
    "exaone4": Family(
        without(OLMO2, "q_row_norm", "k_row_norm") | {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"},
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "layer_types": exaone4_kinds},
        {"windows": sliding_windows, "rope": window_rope},
        ("q_norm", "k_norm", *POST_NORMS),
        facts={"join": "post_norm"},
    ),
    "cohere2": Family(
        without(LLAMA, "mlp_norm", "q_norm", "k_norm"),
        {"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "max_position_embeddings": 8192,
         "sliding_window": 4096, "layer_types": alternating(4)},
        {"logit_scale": lambda config, layers: config.number("logit_scale"), "windows": sliding_windows,
         "rope": window_rope},
        flags=BIAS_FLAGS,
        facts={"norm": "layer", "join": "parallel", "interleaved_rope": True},
        spelling=(("rms_norm_eps", "layer_norm_eps"),),
    ),
    "vaultgemma": Family(
        without(GEMMA, *POST_NORMS, "q_norm", "k_norm"),
        GEMMA2_DEFAULTS,
        GEMMA2_READS,
        flags=BIAS_FLAGS,
        facts={"norm": "rms1p"},
        spelling=(("hidden_act", "hidden_activation"),),
    ),
    "arcee": Family(
        without(LLAMA, "gate", "q_norm", "k_norm"),
        {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        flags=BIAS_FLAGS,
    ),
    "nemotron": Family(
        without(LLAMA, "gate", "q_norm", "k_norm"),
        {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 4096},
        required=NORM_BIASES,
        flags=BIAS_FLAGS,
        facts={"norm": "layer1p"},
        spelling=(("rms_norm_eps", "norm_eps"),),
    ),
    "gpt_neo": Family(
        GPT_NEO,
        {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
         "max_position_embeddings": 2048, "window_size": 256, "intermediate_size": four_times},
        {"rope": no_rope, "windows": gpt_neo_windows},
        ("positions", "o.bias", "up.bias", "down.bias", *NORM_BIASES),
        facts={"norm": "layer", "attention_scale": 1.0},
        spelling=(("num_hidden_layers", "num_layers"), ("num_attention_heads", "num_heads"),
                  ("hidden_act", "activation_function"), ("rms_norm_eps", "layer_norm_epsilon")),
        prefix="transformer.",
        buffers=MASKS,
    ),
}  # fmt: skip
