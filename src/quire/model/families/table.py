"""The rows: one per model type, in terms of family.Family."""

from __future__ import annotations

from collections.abc import Callable

from quire.model.disk.hf_config import HfConfig
from quire.model.families.channel_scans import CHANNEL_SCANS
from quire.model.families.deepseek_v4 import DEEPSEEK_V4
from quire.model.families.delta_hybrids import DELTA_HYBRIDS
from quire.model.families.dots3 import dots3_note
from quire.model.families.encoders import ENCODERS
from quire.model.families.encoders_with_parts import WITH_PARTS
from quire.model.families.falcon_h1 import falcon_h1
from quire.model.families.gemma3n import GEMMAS
from quire.model.families.glm5_next import glm5_next
from quire.model.families.hrm import hrm_text
from quire.model.families.hy_v4 import hy_v4
from quire.model.families.hybrids import HYBRIDS
from quire.model.families.kimi import kimi_linear
from quire.model.families.latent_mixtures import LATENT_MIXTURES
from quire.model.families.llama4 import LLAMA4_TEXT
from quire.model.families.llama_like import GEMMA2_DEFAULTS, GEMMA2_READS, RELATIVES
from quire.model.families.mimo import GATED_AND_WINDOWED
from quire.model.families.minimax import MINIMAX
from quire.model.families.mixtures import MIXTURES
from quire.model.families.names import (
    BIAS_FLAGS,
    BLOOM,
    GEMMA,
    GPT2,
    GPT2_SPELLING,
    GPTJ,
    LLAMA,
    MASKS,
    MPT,
    NEOX,
    NEOX_BIASES,
    NORM_BIASES,
    OLMO2,
    POST_NORMS,
    QKV_BIAS,
    without,
)
from quire.model.families.newer_dense import NEWER_DENSE
from quire.model.families.newer_mixtures import NEWER_MIXTURES
from quire.model.families.older_dense import OLDER_DENSE
from quire.model.families.published import PUBLISHED
from quire.model.families.published_mixtures import PUBLISHED_MIXTURES
from quire.model.families.qwen4 import qwen4_exp
from quire.model.families.readers import (
    alibi_slopes,
    alternating,
    embed_scale,
    every_head,
    four_times,
    gemma3_rope,
    gpt2_scale,
    gptj_rope,
    mpt_scale,
    mpt_slopes,
    multi_query,
    neox_join,
    no_rope,
    query_scale,
    smollm3_rope,
)
from quire.model.families.row import Family, sliding_windows
from quire.model.families.sparse import SPARSE
from quire.model.families.speech import SPEECH
from quire.model.families.stacked_mixtures import STACKED_MIXTURES
from quire.model.families.state_space import STATE_SPACE
from quire.model.families.variants import LAYER, falcon, granite, mt5, opt, stablelm, t5
from quire.model.families.zamba2 import zamba2

QWEN = {"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

GPT2_DEFAULTS = {
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "intermediate_size": four_times,
}

GPT2_ROW = Family(
    GPT2,
    GPT2_DEFAULTS,
    {"rope": no_rope, "attention_scale": gpt2_scale},
    ("positions", *NEOX_BIASES, *NORM_BIASES),
    facts=LAYER,
    spelling=GPT2_SPELLING,
    transposed=True,
    prefix="transformer.",
    buffers=MASKS,
)


Row = Family | Callable[[HfConfig], Family]
FAMILIES: dict[str, Row] = {
    "llama": Family(LLAMA, flags=BIAS_FLAGS),
    "mistral": Family(
        LLAMA,
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        {"windows": sliding_windows},
    ),
    "qwen2": Family(LLAMA, QWEN, {"windows": sliding_windows}, QKV_BIAS),
    "qwen3": Family(LLAMA, QWEN | {"head_dim": 128}, {"windows": sliding_windows}, ("q_norm", "k_norm"), BIAS_FLAGS),
    "phi3": Family(
        without(LLAMA, "q", "k", "v", "gate", "up") | {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        {"windows": sliding_windows},
    ),
    "smollm3": Family(
        LLAMA,
        {
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "use_sliding_window": False,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
        },
        {"rope": smollm3_rope, "windows": sliding_windows},
        flags=BIAS_FLAGS,
    ),
    "olmo": Family(
        without(LLAMA, "attn_norm", "mlp_norm", "final_norm"),
        {"rms_norm_eps": 1e-5},
        {"clip_qkv": lambda config, layers: config.number("clip_qkv", 0.0)},
        flags=BIAS_FLAGS,
        facts={"norm": "plain"},
    ),
    "olmo2": Family(
        OLMO2,
        {"rms_norm_eps": 1e-5},
        required=("q_row_norm", "k_row_norm", *POST_NORMS),
        flags=BIAS_FLAGS,
        facts={"join": "post_norm"},
    ),
    "granite": granite,
    "gemma": Family(
        LLAMA,
        {
            "head_dim": 256,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
        },
        {"embed_scale": embed_scale},
        flags=BIAS_FLAGS,
        facts={"norm": "rms1p"},
    ),
    "gemma2": Family(
        GEMMA,
        GEMMA2_DEFAULTS,
        GEMMA2_READS,
        POST_NORMS,
        BIAS_FLAGS,
        {"norm": "rms1p", "join": "post_norm"},
        (("hidden_act", "hidden_activation"),),
    ),
    "gemma3_text": Family(
        GEMMA,
        {"head_dim": 256, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
         "max_position_embeddings": 131072, "sliding_window": 4096, "layer_types": alternating(6), "rope_theta": 1e6},
        {"windows": sliding_windows, "embed_scale": embed_scale, "attention_scale": query_scale, "rope": gemma3_rope,
         "output_softcap": lambda config, layers: config.number("final_logit_softcapping", 0.0)},
        (*POST_NORMS, "q_norm", "k_norm"),
        BIAS_FLAGS,
        {"norm": "rms1p", "join": "post_norm"},
        (("hidden_act", "hidden_activation"),),
    ),
    "starcoder2": Family(
        without(LLAMA, "gate") | {"up": "mlp.c_fc", "down": "mlp.c_proj"},
        {"tie_word_embeddings": True, "use_bias": True, "norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh",
         "num_key_value_heads": 2, "max_position_embeddings": 4096},
        {"windows": sliding_windows},
        NORM_BIASES,
        {"use_bias": (*QKV_BIAS, "o.bias", "up.bias", "down.bias")},
        LAYER,
        (("rms_norm_eps", "norm_epsilon"),),
    ),
    "stablelm": stablelm,
    "cohere": Family(
        without(LLAMA, "mlp_norm", "q_norm", "k_norm")
        | {"q_head_norms": "self_attn.q_norm", "k_head_norms": "self_attn.k_norm"},
        {
            "tie_word_embeddings": True,
            "layer_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
        },
        {"logit_scale": lambda config, layers: config.number("logit_scale")},
        flags=BIAS_FLAGS | {"use_qk_norm": ("q_head_norms", "k_head_norms")},
        facts=LAYER | {"join": "parallel", "interleaved_rope": True},
        spelling=(("rms_norm_eps", "layer_norm_eps"),),
    ),
    "phi": Family(
        without(LLAMA, "mlp_norm", "gate", "q_norm", "k_norm")
        | {"o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2", "final_norm": "model.final_layernorm"},
        {"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
        required=(*QKV_BIAS, "o.bias", "up.bias", "down.bias", "attn_norm.bias", "final_norm.bias", "head.bias"),
        facts=LAYER | {"join": "parallel"},
        spelling=(("rms_norm_eps", "layer_norm_eps"),),
    ),
    "gpt2": GPT2_ROW,
    "gpt-sw3": GPT2_ROW,
    "gpt_bigcode": Family(
        GPT2,
        GPT2_DEFAULTS
        | {"multi_query": True, "activation_function": "gelu_pytorch_tanh", "num_key_value_heads": multi_query},
        {"rope": no_rope, "attention_scale": gpt2_scale},
        ("positions", *NEOX_BIASES, *NORM_BIASES),
        facts=LAYER,
        spelling=GPT2_SPELLING,
        grouped_qkv=True,
        prefix="transformer.",
        buffers=MASKS,
    ),
    "gptj": Family(
        GPTJ,
        GPT2_DEFAULTS | {"tie_word_embeddings": False, "max_position_embeddings": 2048, "rotary_dim": 64},
        {"rope": gptj_rope},
        ("up.bias", "down.bias", "attn_norm.bias", "final_norm.bias", "head.bias"),
        facts=LAYER | {"join": "parallel", "interleaved_rope": True},
        spelling=GPT2_SPELLING,
        prefix="transformer.",
        buffers=MASKS,
    ),
    "gpt_neox": Family(
        NEOX,
        {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "rotary_pct": 0.25, "attention_bias": True},
        {"join": neox_join, "kv_heads": every_head},
        ("up.bias", "down.bias", *NORM_BIASES),
        {"attention_bias": ("qkv.bias", "o.bias")},
        LAYER,
        (("rms_norm_eps", "layer_norm_eps"), ("partial_rotary_factor", "rotary_pct"),
         ("rope_theta", "rotary_emb_base")),
        grouped_qkv=True,
        aliases={"head": ("lm_head",)},
        buffers=MASKS,
    ),
    "opt": opt,
    "bloom": Family(
        BLOOM,
        {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh",
         "intermediate_size": four_times, "max_position_embeddings": 2048},
        {"rope": no_rope, "alibi": alibi_slopes},
        ("embed_norm", "embed_norm.bias", *NEOX_BIASES, *NORM_BIASES),
        facts=LAYER,
        spelling=(("hidden_size", "n_embed"), ("max_position_embeddings", "seq_length"), *GPT2_SPELLING),
        grouped_qkv=True,
        prefix="transformer.",
    ),
    "falcon": falcon,
    "mpt": Family(
        MPT,
        {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "hidden_act": "gelu", "expansion_ratio": 4,
         "intermediate_size": lambda c: c.integer("expansion_ratio") * c.integer("d_model", high=1 << 20)},
        {"rope": no_rope, "alibi": mpt_slopes, "attention_scale": mpt_scale,
         "clip_qkv": lambda config, layers: config.child("attn_config").number("clip_qkv", 0.0)},
        facts=LAYER,
        spelling=(("hidden_size", "d_model"), ("num_attention_heads", "n_heads"), ("num_hidden_layers", "n_layers"),
                  ("max_position_embeddings", "max_seq_len"), ("rms_norm_eps", "layer_norm_epsilon")),
    ),
    "glm4": Family(
        without(LLAMA, "gate", "up", "q_norm", "k_norm") | {"gate_up": "mlp.gate_up_proj",
                                                            "attn_post_norm": "post_self_attn_layernorm",
                                                            "mlp_post_norm": "post_mlp_layernorm"},
        {"head_dim": 128, "partial_rotary_factor": 0.5, "num_key_value_heads": 2, "attention_bias": True,
         "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7},
        required=POST_NORMS,
        flags={"attention_bias": QKV_BIAS},
        facts={"join": "post_norm", "interleaved_rope": True},
    ),
    "t5": t5,
    "mt5": mt5,
    **SPEECH,
    **RELATIVES,
    **NEWER_DENSE,
    **OLDER_DENSE,
    **PUBLISHED,
    **MIXTURES,
    **LATENT_MIXTURES,
    **GATED_AND_WINDOWED,
    **SPARSE,
    **NEWER_MIXTURES,
    **PUBLISHED_MIXTURES,
    **STACKED_MIXTURES,
    **HYBRIDS,
    **DELTA_HYBRIDS,
    **STATE_SPACE,
    **CHANNEL_SCANS,
    "falcon_h1": falcon_h1,
    "kimi_linear": kimi_linear,
    "hrm_text": hrm_text,
    "glm5_next_text": glm5_next,
    "hy_v4": hy_v4,
    "qwen4_exp_text": qwen4_exp,
    "dots3_note_text": dots3_note,
    "deepseek_v4": DEEPSEEK_V4,
    "minimax": MINIMAX,
    "minimax_m1": MINIMAX,
    "minimax_text_01": MINIMAX,
    "llama4_text": LLAMA4_TEXT,
    **GEMMAS,
    **ENCODERS,
    **WITH_PARTS,
    "zamba2": zamba2,
}  # fmt: skip
