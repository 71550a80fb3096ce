"""The rows: one per model type, in terms of family.Family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.model.family import Family, sliding_windows, spec_facts
from quire.model.hf_config import HfConfig
from quire.model.rope import NO_ROPE, Rope
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
