"""The rows: one per model type, in terms of family.Family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from quire.model.family import Family, layer_kinds, sliding_windows, spec_facts
from quire.model.hf_config import HfConfig
from quire.model.rope import NO_ROPE, Rope, read_rope
from quire.model.spec import ModelSpec

LLAMA = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "layer": "model.layers.{}.",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
GPT2 = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "layer": "transformer.h.{}.",
    "attn_norm": "ln_1",
    "mlp_norm": "ln_2",
    "qkv": "attn.c_attn",
    "o": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
BLOOM = {
    "embed": "transformer.word_embeddings",
    "embed_norm": "transformer.word_embeddings_layernorm",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "layer": "transformer.h.{}.",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "qkv": "self_attention.query_key_value",
    "o": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
NEOX = {
    "embed": "gpt_neox.embed_in",
    "final_norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
    "layer": "gpt_neox.layers.{}.",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "qkv": "attention.query_key_value",
    "o": "attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
GPTJ = {
    "embed": "transformer.wte",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "layer": "transformer.h.{}.",
    "attn_norm": "ln_1",
    "q": "attn.q_proj",
    "k": "attn.k_proj",
    "v": "attn.v_proj",
    "o": "attn.out_proj",
    "up": "mlp.fc_in",
    "down": "mlp.fc_out",
}
OPT = {
    "embed": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "final_norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
    "layer": "model.decoder.layers.{}.",
    "attn_norm": "self_attn_layer_norm",
    "mlp_norm": "final_layer_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "up": "fc1",
    "down": "fc2",
}
MPT = {
    "embed": "transformer.wte",
    "final_norm": "transformer.norm_f",
    "head": "lm_head",
    "layer": "transformer.blocks.{}.",
    "attn_norm": "norm_1",
    "mlp_norm": "norm_2",
    "qkv": "attn.Wqkv",
    "o": "attn.out_proj",
    "up": "ffn.up_proj",
    "down": "ffn.down_proj",
}
QKV_BIAS = ("q.bias", "k.bias", "v.bias")
BIAS_FLAGS = {
    "attention_bias": (*QKV_BIAS, "o.bias"),
    "mlp_bias": ("gate.bias", "up.bias", "down.bias"),
}
NEOX_BIASES = ("qkv.bias", "o.bias", "up.bias", "down.bias")
NORM_BIASES = ("attn_norm.bias", "mlp_norm.bias", "final_norm.bias")
QWEN = {"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
GPT2_SPELLING = (
    ("hidden_size", "n_embd"),
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("max_position_embeddings", "n_positions"),
    ("intermediate_size", "n_inner"),
    ("hidden_act", "activation_function"),
    ("rms_norm_eps", "layer_norm_epsilon"),
)


def without(names: Mapping[str, str], *roles: str) -> dict[str, str]:
    """`names` less those of `roles`."""
    return {role: name for role, name in names.items() if role not in roles}


def four_times(config: HfConfig) -> int:
    """The usual width of an MLP without a gate."""
    return 4 * config.integer("hidden_size", high=1 << 20)


def refuse(config: HfConfig, name: str, reason: str) -> None:
    """Stop with `reason` when the flag `name` is set."""
    if config.flag(name, False):
        raise config.fail(name, reason)


def no_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """No layer rotates."""
    return (NO_ROPE,) * layers


GPT2_DEFAULTS = {
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "intermediate_size": four_times,
}
LAYER = {"norm": "layer"}
MASKS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
GEMMA = LLAMA | {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
POST_NORMS = ("attn_post_norm", "mlp_post_norm")


def alternating(period: int) -> Callable[[HfConfig], list[str]]:
    """`layer_types` where every `period`-th layer sees everything and the others a window."""

    def kinds(config: HfConfig) -> list[str]:
        every = config.integer("sliding_window_pattern", period)
        layers = config.integer("num_hidden_layers", high=1024)
        return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]

    return kinds


def embed_scale(config: HfConfig, layers: int) -> float:
    """Gemma's: the square root of the width."""
    return math.sqrt(config.integer("hidden_size"))


def query_scale(config: HfConfig, layers: int) -> float:
    """Gemma 2 and 3: 1 / sqrt(query_pre_attn_scalar)."""
    return 1.0 / math.sqrt(config.number("query_pre_attn_scalar", 256.0))


def gemma3_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """Windowed layers turn by `rope_local_base_freq` without scaling; newer files give `rope_parameters` per kind."""
    head_dim = config.integer("head_dim")
    local = {"rope_theta": config.number("rope_local_base_freq", 1e4)}
    raw = config.raw if config.has("rope_parameters") else {**config.raw, **local, "rope_scaling": None}
    by_kind = {
        "sliding_attention": read_rope(HfConfig(raw, config.where), head_dim, 1, "sliding_attention"),
        "full_attention": read_rope(config, head_dim, config.integer("max_position_embeddings"), "full_attention"),
    }
    return tuple(by_kind[kind] for kind in layer_kinds(config, layers))


def smollm3_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """`no_rope_layers` has a 0 for each layer that does not rotate; without it every `no_rope_layer_interval`-th."""
    every = config.integer("no_rope_layer_interval", 4)
    turns = config.raw.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(turns, list) or len(turns) != layers or any(t not in (0, 1) for t in turns):
        raise config.fail("no_rope_layers", f"needs a list of {layers} zeros and ones")
    ropes = spec_facts(config)["rope"]
    return tuple(rope if turn else NO_ROPE for turn, rope in zip(turns, ropes, strict=True))


def granite(config: HfConfig) -> Family:
    """The stream is kept divided by `residual_multiplier`, so that what blocks add needs no factor.

    Norms do not see the division when their epsilon is divided by its square.
    """
    residual = config.number("residual_multiplier", 1.0)
    return Family(
        LLAMA,
        flags=BIAS_FLAGS,
        facts={
            "attention_scale": config.number("attention_multiplier", 1.0),
            "embed_scale": config.number("embedding_multiplier", 1.0) / residual,
            "logit_scale": 1.0 / config.number("logits_scaling", 1.0),
            "norm_eps": config.number("rms_norm_eps", 1e-6) / residual**2,
        },
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
        without(LLAMA, "attn_norm", "mlp_norm", "q_norm", "k_norm")
        | {
            "attn_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
            "q_row_norm": "self_attn.q_norm",
            "k_row_norm": "self_attn.k_norm",
        },
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
        {
            "head_dim": 256,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "layer_types": alternating(2),
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        {
            "windows": sliding_windows,
            "embed_scale": embed_scale,
            "attention_scale": query_scale,
            "softcap": lambda config, layers: config.number("attn_logit_softcapping", 0.0),
            "output_softcap": lambda config, layers: config.number("final_logit_softcapping", 0.0),
        },
        POST_NORMS,
        BIAS_FLAGS,
        {"norm": "rms1p", "join": "post_norm"},
        (("hidden_act", "hidden_activation"),),
    ),
    "gemma3_text": Family(
        GEMMA,
        {
            "head_dim": 256,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "layer_types": alternating(6),
            "rope_theta": 1e6,
        },
        {
            "windows": sliding_windows,
            "embed_scale": embed_scale,
            "attention_scale": query_scale,
            "rope": gemma3_rope,
            "output_softcap": lambda config, layers: config.number("final_logit_softcapping", 0.0),
        },
        (*POST_NORMS, "q_norm", "k_norm"),
        BIAS_FLAGS,
        {"norm": "rms1p", "join": "post_norm"},
        (("hidden_act", "hidden_activation"),),
    ),
}


def find_family(config: HfConfig) -> tuple[str, Family]:
    """The row for `model_type`; `ModelError` naming the known ones."""
    name = config.text("model_type")
    if name not in FAMILIES:
        code = " (the code that auto_map points to is never run)" if config.has("auto_map") else ""
        raise config.fail("model_type", f"{name!r} is not supported{code}; supported: {', '.join(sorted(FAMILIES))}")
    row = FAMILIES[name]
    return name, row(config) if callable(row) else row


def read_spec(raw: Mapping[str, Any], where: str) -> tuple[ModelSpec, Family, HfConfig]:
    """Spec, family and reader (family defaults filled in) of a config.json's content; `where` names it in errors."""
    name, family = find_family(HfConfig(raw, where))
    config = family.fill_in(HfConfig(raw, where))
    facts = {**spec_facts(config), **family.facts}
    facts |= {field: read(config, facts["layers"]) for field, read in family.read.items()}
    return ModelSpec(family=name, **facts), family, config
