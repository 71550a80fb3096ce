"""Rows of earlier dense decoders: relatives of GPT-2, GPT-J, GPT-NeoX and OPT in names and joins of their own."""

from __future__ import annotations

from collections.abc import Callable

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.edges import Edges
from quire.model.families.names import (
    GPT2_SPELLING,
    GPTJ,
    LLAMA,
    MASKS,
    NEOX,
    NEOX_BIASES,
    NORM_BIASES,
    POST_NORMS,
    QKV_BIAS,
    without,
)
from quire.model.families.readers import embed_scale, every_head, four_times, gptj_rope, no_rope, only, scaled_embedding
from quire.model.families.row import Family
from quire.model.families.variants import LAYER

BIOGPT = {
    "embed": "biogpt.embed_tokens",
    "positions": "biogpt.embed_positions",
    "final_norm": "biogpt.layer_norm",
    "head": "output_projection",
    "layer": "biogpt.layers.{}.",
    "attn_norm": "self_attn_layer_norm",
    "mlp_norm": "final_layer_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "up": "fc1",
    "down": "fc2",
}
GPT = {
    "embed": "transformer.tokens_embed",
    "positions": "transformer.positions_embed",
    "head": "lm_head",
    "layer": "transformer.h.{}.",
    "qkv": "attn.c_attn",
    "o": "attn.c_proj",
    "attn_post_norm": "ln_1",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    "mlp_post_norm": "ln_2",
}
JAPANESE = {role: name.replace("gpt_neox.", "gpt_neox_japanese.") for role, name in NEOX.items()}
LAST_BIAS = Rewrite(r"(.*\.attention)\.dense_bias", r"\1.dense.bias", release=r"\1.dense_bias")
"""The bias of the last layer's output matrix, the only one of the model."""


def codegen(config: HfConfig) -> Family:
    """GPT-J whose queries, values and keys lie in four pieces, one for each core that it was trained on."""
    heads = config.integer("num_attention_heads", config.integer("n_head", 16, high=1 << 12), high=1 << 12)
    if heads % 4:
        raise config.fail("n_head", f"is {heads}, must be a multiple of 4")
    return Family(
        without(GPTJ, "q", "k", "v") | {"qvk": "attn.qkv_proj"},
        {"max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
         "intermediate_size": four_times, "rotary_dim": 64},
        {"rope": gptj_rope},
        ("up.bias", "down.bias", "attn_norm.bias", "final_norm.bias", "head.bias"),
        facts=LAYER | {"join": "parallel", "interleaved_rope": True},
        spelling=GPT2_SPELLING, prefix="transformer.", buffers=(*MASKS, ".attn.causal_mask"),
    )  # fmt: skip


def openai_gpt(config: HfConfig) -> Family:
    """The first GPT (Radford et al. 2018): learned positions, norms behind the additions, and none at the end."""
    act = config.text("afn", "gelu")
    return Family(
        GPT,
        {"tie_word_embeddings": True, "max_position_embeddings": 512, "layer_norm_epsilon": 1e-5,
         "hidden_act": "gelu_new" if act == "gelu" else act, "intermediate_size": four_times},
        {"rope": no_rope, "kv_heads": every_head},
        ("positions", *NEOX_BIASES, *POST_NORMS, *(f"{norm}.bias" for norm in POST_NORMS)),
        facts=LAYER | {"join": "post_ln"},
        spelling=tuple((ours, own) for ours, own in GPT2_SPELLING if own not in ("n_inner", "activation_function")),
        transposed=True, prefix="transformer.", buffers=(*MASKS, "position_ids"),
    )  # fmt: skip


def some_times(config: HfConfig, layers: int) -> int:
    """The width between up and down: `intermediate_multiple_size` times that of the stream."""
    return config.integer("hidden_size", high=1 << 20) * config.integer("intermediate_multiple_size", high=64)


PERSIMMON = without(LLAMA, "q", "k", "v", "o", "gate", "q_norm", "k_norm") | {
    "final_norm": "model.final_layernorm",
    "qkv": "self_attn.query_key_value",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "o": "self_attn.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
XGLM = without(BIOGPT, "positions") | {
    "embed": "model.embed_tokens",
    "final_norm": "model.layer_norm",
    "head": "lm_head",
    "layer": "model.layers.{}.",
}
CTRL = {
    "embed": "transformer.w",
    "final_norm": "transformer.layernorm",
    "head": "lm_head",
    "head_bias": "lm_head_bias",
    "layer": "transformer.h.{}.",
    "attn_norm": "layernorm1",
    "mlp_norm": "layernorm2",
    "q": "multi_head_attention.Wq",
    "k": "multi_head_attention.Wk",
    "v": "multi_head_attention.Wv",
    "o": "multi_head_attention.dense",
    "up": "ffn.0",
    "down": "ffn.2",
}
PLAIN_BIASES = (*QKV_BIAS, "o.bias", "up.bias", "down.bias", *NORM_BIASES)


XGLM_SPELLING = (
    ("hidden_size", "d_model"),
    ("num_hidden_layers", "num_layers"),
    ("num_attention_heads", "attention_heads"),
    ("intermediate_size", "ffn_dim"),
    ("hidden_act", "activation_function"),
)


def xglm(config: HfConfig) -> Family:
    """OPT's names with positions of sines and cosines (Lin et al. 2022)."""
    only(config, add_cross_attention=False)
    half = config.integer("d_model", config.integer("hidden_size", 1024, high=1 << 20), high=1 << 20) // 2
    return Family(
        XGLM,
        {"tie_word_embeddings": True, "activation_function": "gelu", "rms_norm_eps": 1e-5,
         "max_position_embeddings": 2048},
        {"rope": no_rope, "kv_heads": every_head, "embed_scale": scaled_embedding},
        PLAIN_BIASES,
        facts=LAYER | {"position_offset": 2, "edges": Edges(sinusoids=half - 1)},
        spelling=XGLM_SPELLING, buffers=(".embed_positions.weights",),
    )  # fmt: skip


def ctrl(config: HfConfig) -> Family:
    """Positions of sines and cosines, and a head that has a bias beside the table's numbers (Keskar et al. 2019)."""
    return Family(
        CTRL,
        {"tie_word_embeddings": True, "hidden_act": "relu", "rms_norm_eps": 1e-6, "max_position_embeddings": 256},
        {"rope": no_rope, "kv_heads": every_head, "embed_scale": embed_scale},
        ("head_bias", *PLAIN_BIASES),
        facts=LAYER | {"edges": Edges(sinusoids=config.integer("n_embd", 1280, high=1 << 20) // 2)},
        spelling=(("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"),
                  ("intermediate_size", "dff"), ("max_position_embeddings", "n_positions")),
        prefix="transformer.",
        rewrites=(Rewrite(r"lm_head\.bias", "lm_head_bias.weight", release="lm_head.bias"),),
    )  # fmt: skip


OLDER_DENSE: dict[str, Family | Callable[[HfConfig], Family]] = {
    "codegen": codegen,
    "gpt_neox_japanese": Family(
        JAPANESE,
        {"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "hidden_act": "gelu", "intermediate_multiple_size": 4,
         "intermediate_size": four_times},
        {"kv_heads": every_head, "intermediate": some_times},
        ("o.bias", *NORM_BIASES),
        facts=LAYER,
        spelling=(("rms_norm_eps", "layer_norm_eps"), ("partial_rotary_factor", "rotary_pct"),
                  ("rope_theta", "rotary_emb_base")),
        grouped_qkv=True,
        buffers=MASKS,
        rewrites=(LAST_BIAS,),
        last=("o.bias",),
    ),
    "biogpt": Family(
        BIOGPT,
        {
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "scale_embedding": True,
            "max_position_embeddings": 1024,
        },
        {"rope": no_rope, "kv_heads": every_head, "embed_scale": scaled_embedding},
        ("positions", *QKV_BIAS, "o.bias", "up.bias", "down.bias", *NORM_BIASES),
        facts=LAYER | {"position_offset": 2},
        prefix="biogpt.",
    ),
    "openai-gpt": openai_gpt,
    "persimmon": Family(
        PERSIMMON,
        {"hidden_act": "relu2", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 16384,
         "qk_layernorm": True},
        {"kv_heads": every_head},
        (*NEOX_BIASES, *NORM_BIASES),
        {"qk_layernorm": ("q_norm", "k_norm", "q_norm.bias", "k_norm.bias")},
        LAYER,
        (("rms_norm_eps", "layer_norm_eps"),),
        grouped_qkv=True,
    ),
    "xglm": xglm,
    "ctrl": ctrl,
}  # fmt: skip
