"""Rows of dense decoders that transformers has no code for; they follow the modelling files published with them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.model.disk.hf_config import HfConfig
from quire.model.families.names import BIAS_FLAGS, GPT2, LLAMA, MLP_BIAS, NORM_BIASES, QKV_BIAS, without
from quire.model.families.readers import every_head, only
from quire.model.families.row import Family
from quire.model.families.variants import LAYER
from quire.model.spec import ModelSpec

EXAONE = {
    "embed": "transformer.wte",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "layer": "transformer.h.{}.",
    "attn_norm": "ln_1",
    "mlp_norm": "ln_2",
    "q": "attn.attention.q_proj",
    "k": "attn.attention.k_proj",
    "v": "attn.attention.v_proj",
    "o": "attn.attention.out_proj",
    "gate": "mlp.c_fc_0",
    "up": "mlp.c_fc_1",
    "down": "mlp.c_proj",
}
CHATGLM = {
    "embed": "transformer.embedding.word_embeddings",
    "final_norm": "transformer.encoder.final_layernorm",
    "head": "transformer.output_layer",
    "layer": "transformer.encoder.layers.{}.",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "qkv": "self_attention.query_key_value",
    "o": "self_attention.dense",
    "gate_up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
CHATGLM_DEFAULTS = {"partial_rotary_factor": 0.5, "layernorm_epsilon": 1e-5, "max_position_embeddings": 2048}
"""Half of a head turns, in pairs."""
CHATGLM_SPELLING = (
    ("num_hidden_layers", "num_layers"),
    ("head_dim", "kv_channels"),
    ("intermediate_size", "ffn_hidden_size"),
    ("vocab_size", "padded_vocab_size"),
    ("max_position_embeddings", "seq_length"),
    ("rms_norm_eps", "layernorm_epsilon"),
)
QWEN = without(GPT2, "positions", "up", "down") | {"gate": "mlp.w2", "up": "mlp.w1", "down": "mlp.c_proj"}


def internlm(config: HfConfig) -> Family:
    """Llama with biases in attention. Up to the length it was trained with its rope is a plain one."""
    base = config.child("rotary").number("base", 1e4)
    return Family(LLAMA, {"bias": True, "rope_theta": base}, flags={"bias": (*QKV_BIAS, "o.bias")})


def minicpm(config: HfConfig) -> Family:
    """Llama with muP's scales (Hu et al. 2024). As in Granite the stream is kept divided by what is added's factor."""
    if config.has("sparse_config"):
        raise config.fail("sparse_config", "sparse attention is not supported; without it every token sees all")
    if experts := next((field for field in ("num_experts", "num_local_experts") if config.raw.get(field)), ""):
        raise config.fail(experts, "experts are not supported for this family")
    added = config.number("scale_depth", 1.0) / config.integer("num_hidden_layers", high=1024) ** 0.5
    facts = {
        "embed_scale": config.number("scale_emb", 1.0) / added,
        "norm_eps": config.number("rms_norm_eps", 1e-6) / added**2,
        "logit_scale": config.integer("dim_model_base", 1, high=1 << 20) / config.integer("hidden_size", high=1 << 20),
    }
    return Family(LLAMA, {"tie_word_embeddings": True}, flags=BIAS_FLAGS, facts=facts)


def chatglm_groups(config: HfConfig, layers: int) -> int:
    """Heads of keys and values: `multi_query_group_num` where `multi_query_attention`, else one for each of queries."""
    grouped = config.flag("multi_query_attention", False)
    return config.integer("multi_query_group_num", 1, high=1 << 12) if grouped else every_head(config, layers)


def without_images(config: HfConfig) -> None:
    """Refuse a model that sees."""
    if config.has("vision_config"):
        raise config.fail("vision_config", "images are not supported for this family")


def chatglm(config: HfConfig) -> Family:
    """ChatGLM 2 and 3, and GLM 4 in their files' form. The first has the same name, and sees the prompt both ways."""
    if config.flag("position_encoding_2d", False) or not config.has("num_layers"):
        raise config.fail("model_type", "the first ChatGLM is not supported; the second, third and GLM 4 are")
    without_images(config)
    only(config, rmsnorm=True, post_layer_norm=True, apply_residual_connection_post_layernorm=False)
    return Family(
        CHATGLM,
        CHATGLM_DEFAULTS | {"rope_theta": 1e4 * config.number("rope_ratio", 1.0)},
        {"kv_heads": chatglm_groups},
        flags={"add_qkv_bias": ("qkv.bias",), "add_bias_linear": ("qkv.bias", "o.bias", *MLP_BIAS)},
        facts={"interleaved_rope": True}, spelling=CHATGLM_SPELLING, prefix="transformer.",
        buffers=("rotary_pos_emb.inv_freq",),
    )  # fmt: skip


def qwen(config: HfConfig) -> Family:
    """The first Qwen, up to the length that it was trained with: behind that its code changes the rope's base and
    scales queries, each with the length."""
    return Family(
        QWEN,
        {"layer_norm_epsilon": 1e-6, "seq_length": 2048, "rms_norm_eps": 1e-6},
        {"intermediate": lambda c, layers: c.integer("intermediate_size", high=1 << 24) // 2},
        ("qkv.bias",),
        spelling=(("max_position_embeddings", "seq_length"), ("head_dim", "kv_channels"),
                  ("rms_norm_eps", "layer_norm_epsilon"), ("rope_theta", "rotary_emb_base"),
                  ("partial_rotary_factor", "rotary_pct")),
        prefix="transformer.",
    )  # fmt: skip


def taking_turns(spec: ModelSpec) -> NDArray[np.int64]:
    """Where rows of queries, columns of the result, lie in files whose heads take keys in turns; ours that read the
    first key come first."""
    heads: NDArray[np.int64] = np.arange(spec.heads, dtype=np.int64).reshape(-1, spec.kv_heads).T.flatten()
    return (heads[:, None] * spec.head_dim + np.arange(spec.head_dim)).flatten()


PUBLISHED: dict[str, Family | Callable[[HfConfig], Family]] = {
    "aquila": Family(LLAMA),
    "chatglm": chatglm,
    "exaone": Family(
        EXAONE,
        {"activation_function": "silu"},
        spelling=(
            ("num_hidden_layers", "num_layers"),
            ("hidden_act", "activation_function"),
            ("rms_norm_eps", "layer_norm_epsilon"),
        ),
        prefix="transformer.",
    ),
    "internlm": internlm,
    "minicpm": minicpm,
    "orion": Family(LLAMA, {"max_position_embeddings": 4096}, required=NORM_BIASES, facts=LAYER),
    "plamo": Family(
        without(LLAMA, "mlp_norm", "q_norm", "k_norm") | {"layer": "model.layers.layers.{}.", "attn_norm": "norm"},
        {
            "n_shared_head": 8,
            "num_key_value_heads": lambda c: c.integer("num_attention_heads") // c.integer("n_shared_head"),
        },
        facts={"join": "parallel"},
        orders={"q": taking_turns, "o": taking_turns},
    ),
    "qwen": qwen,
    "xverse": Family(LLAMA),
}
