"""Rows of the table that are functions: families whose tensors or joins depend on config.json."""

from __future__ import annotations

from dataclasses import replace

from quire.model.disk.hf_config import HfConfig
from quire.model.families.names import (
    BIAS_FLAGS,
    BLOOM,
    LLAMA,
    NEOX_BIASES,
    NORM_BIASES,
    OPT,
    POST_NORMS,
    QKV_BIAS,
    T5,
    without,
)
from quire.model.families.readers import (
    alibi_slopes,
    encoder_stack,
    endless,
    every_head,
    four_times,
    multi_query,
    no_rope,
    only,
    scaled_output,
    twice,
)
from quire.model.families.row import Family, Reader

LAYER = {"norm": "layer"}


def granite_facts(config: HfConfig) -> dict[str, float]:
    """Multipliers of a Granite.

    The stream is kept divided by `residual_multiplier`, so that what blocks add needs no factor.
    Norms do not see the division when their epsilon is divided by its square.
    """
    residual = config.number("residual_multiplier", 1.0)
    return {
        "attention_scale": config.number("attention_multiplier", 1.0),
        "embed_scale": config.number("embedding_multiplier", 1.0) / residual,
        "logit_scale": 1.0 / config.number("logits_scaling", 1.0),
        "norm_eps": config.number("rms_norm_eps", 1e-6) / residual**2,
    }


def granite(config: HfConfig) -> Family:
    """Llama with multipliers."""
    return Family(LLAMA, flags=BIAS_FLAGS, facts=granite_facts(config))


def stablelm(config: HfConfig) -> Family:
    """Family of StableLM: its parallel blocks have one norm. Per-head norms lie head by head."""
    parallel = config.flag("use_parallel_residual", False)
    heads = {"q_head_norms": "self_attn.q_layernorm", "k_head_norms": "self_attn.k_layernorm"}
    return Family(
        without(LLAMA, "q_norm", "k_norm", *(("mlp_norm",) if parallel else ())) | heads,
        {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096},
        flags={"use_qkv_bias": QKV_BIAS, "qk_layernorm": tuple(heads)},
        required=("attn_norm.bias", "final_norm.bias", *(() if parallel else ("mlp_norm.bias",))),
        facts=LAYER | {"join": "parallel" if parallel else "sequential"},
        spelling=(("rms_norm_eps", "layer_norm_eps"),),
        stacks={role: f"{name}.norms.{{}}" for role, name in heads.items()},
    )


def opt_names(config: HfConfig) -> tuple[dict[str, str], tuple[str, ...]]:
    """Names, and norms and biases that must be there: norms are behind the additions where `do_layer_norm_before` is
    false, and have no weights where `layer_norm_elementwise_affine` is."""
    before, affine = config.flag("do_layer_norm_before", True), config.flag("layer_norm_elementwise_affine", True)
    biases = (*QKV_BIAS, "o.bias", "up.bias", "down.bias") if config.flag("enable_bias", True) else ()
    if not affine:
        if not before:
            raise config.fail("layer_norm_elementwise_affine", "false is not supported with do_layer_norm_before false")
        return without(OPT, "attn_norm", "mlp_norm", "final_norm"), biases
    if before:
        return OPT, (*biases, *NORM_BIASES)
    renamed = {"attn_post_norm": OPT["attn_norm"], "mlp_post_norm": OPT["mlp_norm"]}
    norms = (*POST_NORMS, "attn_post_norm.bias", "mlp_post_norm.bias")
    return without(OPT, "attn_norm", "mlp_norm", "final_norm") | renamed, (*biases, *norms)


def opt(config: HfConfig) -> Family:
    """Learned positions start at row 2. 350m norms after the additions, and embeds in another width."""
    only(config, _remove_final_layer_norm=False)
    (names, required), width = opt_names(config), config.integer("word_embed_proj_dim", None)
    narrow = width is not None and width != config.integer("hidden_size")
    return Family(
        names,
        {"tie_word_embeddings": True, "activation_function": "relu", "rms_norm_eps": 1e-5},
        {"kv_heads": every_head, "rope": no_rope},
        ("positions", *required, *(("project_in", "project_out") if narrow else ())),
        facts={"norm": "layer" if config.flag("layer_norm_elementwise_affine", True) else "plain", "position_offset": 2,
               "join": "post_ln" if "attn_post_norm" in names else "sequential", "embed_dim": width if narrow else 0},
        spelling=(("intermediate_size", "ffn_dim"), ("hidden_act", "activation_function")), prefix="model.",
    )  # fmt: skip


def falcon_norms(config: HfConfig) -> tuple[str, dict[str, str]]:
    """How a layer is joined, and names: two norms of attention and MLP, one of both, or one after the other."""
    new, names = config.flag("new_decoder_architecture", False), without(BLOOM, "embed_norm")
    if new and config.integer("num_ln_in_parallel_attn", 2) == 2:
        return "parallel_two_norms", names | {"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    parallel = new or config.flag("parallel_attn", True)
    return ("parallel", without(names, "mlp_norm")) if parallel else ("sequential", names)


def falcon_kv_heads(config: HfConfig, layers: int) -> int:
    """Heads of keys and values, one unless the file says otherwise."""
    new = config.flag("new_decoder_architecture", False)
    return config.integer("num_kv_heads", config.integer("num_attention_heads")) if new else multi_query(config)


def scaled_slopes(config: HfConfig, layers: int) -> tuple[float, ...]:
    """ALiBi slopes that scale with the scores."""
    scale = (config.integer("hidden_size") // config.integer("num_attention_heads")) ** -0.5
    return tuple(slope * scale for slope in alibi_slopes(config, layers))


FALCON_DEFAULTS = {
    "tie_word_embeddings": True,
    "layer_norm_epsilon": 1e-5,
    "activation": "gelu",
    "intermediate_size": four_times,
}
FALCON_SPELLING = (
    ("intermediate_size", "ffn_hidden_size"),
    ("rms_norm_eps", "layer_norm_epsilon"),
    ("hidden_act", "activation"),
)


def falcon(config: HfConfig) -> Family:
    """Sequential, parallel with one norm, or (the new architecture) with two."""
    join, names = falcon_norms(config)
    turns: dict[str, Reader] = {"rope": no_rope, "alibi": scaled_slopes} if config.flag("alibi", False) else {}
    return Family(
        names,
        FALCON_DEFAULTS,
        turns | {"kv_heads": falcon_kv_heads},
        tuple(f"{role}.bias" for role in ("attn_norm", "mlp_norm", "final_norm") if role in names),
        {"bias": NEOX_BIASES},
        LAYER | {"join": join},
        FALCON_SPELLING,
        grouped_qkv=True, prefix="transformer.",
    )  # fmt: skip


T5_SPELLING = (
    ("hidden_size", "d_model"),
    ("head_dim", "d_kv"),
    ("intermediate_size", "d_ff"),
    ("num_attention_heads", "num_heads"),
    ("num_hidden_layers", "num_layers"),
    ("num_hidden_layers", "num_decoder_layers"),
    ("rms_norm_eps", "layer_norm_epsilon"),
    ("max_position_embeddings", "n_positions"),
)
T5_DEFAULTS = {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-6, "n_positions": 512, "num_layers": 6}
T5_PLAIN = without(T5, "gate", "encoder_gate") | {
    "up": "2.DenseReluDense.wi",
    "encoder_up": "1.DenseReluDense.wi",
}
T5_READS: dict[str, Reader] = {
    "kv_heads": every_head,
    "rope": endless,
    "max_position": twice,
    "encoder": encoder_stack,
    "logit_scale": scaled_output,
}
T5_TABLES = ("encoder.embed_tokens", "decoder.embed_tokens")
"""Where files have the table of tokens, too."""


def t5(config: HfConfig) -> Family:
    """v1.0 has a plain MLP, v1.1 and FLAN a gated one. Scores are not scaled; a tied head's logits are."""
    gate, _, activation = config.text("feed_forward_proj", "relu").rpartition("-")
    if gate not in ("", "gated"):
        raise config.fail("feed_forward_proj", f"{gate!r} before the activation is not known; known: gated")
    return Family(
        T5 if gate else T5_PLAIN,
        T5_DEFAULTS | {"hidden_act": "gelu_new" if gate and activation == "gelu" else activation},
        T5_READS,
        ("relative_bias", "encoder_relative_bias", "encoder_final_norm"),
        facts={"join": "crossed", "attention_scale": 1.0}, spelling=T5_SPELLING, aliases={"embed": T5_TABLES},
        skipped=(*(f"{table}." for table in T5_TABLES),
                 "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias."),
    )  # fmt: skip


def mt5(config: HfConfig) -> Family:
    """T5 v1.1 whose logits are not scaled, whatever the file says of its head."""
    family = t5(HfConfig({"feed_forward_proj": "gated-gelu", **config.raw}, config.where))
    read = {name: reader for name, reader in family.read.items() if name != "logit_scale"}
    return replace(family, defaults={**family.defaults, "num_layers": 8}, read=read)
