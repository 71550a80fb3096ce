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
    scaled_output,
    twice,
)
from quire.model.families.row import Family

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


def opt(config: HfConfig) -> Family:
    """Learned positions start at row 2. 350m norms after the additions, and embeds in another width."""
    if config.flag("_remove_final_layer_norm", False):
        raise config.fail("_remove_final_layer_norm", "true is not supported")
    before = config.flag("do_layer_norm_before", True)
    biases = (*QKV_BIAS, "o.bias", "up.bias", "down.bias") if config.flag("enable_bias", True) else ()
    affine = config.flag("layer_norm_elementwise_affine", True)
    if not before and not affine:
        raise config.fail("layer_norm_elementwise_affine", "false is not supported with do_layer_norm_before false")
    names = OPT if affine else without(OPT, "attn_norm", "mlp_norm", "final_norm")
    norms: tuple[str, ...] = NORM_BIASES
    if not before:
        renamed = {"attn_post_norm": names["attn_norm"], "mlp_post_norm": names["mlp_norm"]}
        names = without(names, "attn_norm", "mlp_norm", "final_norm") | renamed
        norms = (*POST_NORMS, "attn_post_norm.bias", "mlp_post_norm.bias")
    width, hidden = config.integer("word_embed_proj_dim", None), config.integer("hidden_size")
    narrow = width is not None and width != hidden
    return Family(
        names,
        {"tie_word_embeddings": True, "activation_function": "relu", "rms_norm_eps": 1e-5},
        {"kv_heads": every_head, "rope": no_rope},
        ("positions", *biases, *(norms if affine else ()), *(("project_in", "project_out") if narrow else ())),
        facts={
            "norm": "layer" if affine else "plain",
            "join": "sequential" if before else "post_ln",
            "position_offset": 2,
            "embed_dim": width if narrow else 0,
        },
        spelling=(("intermediate_size", "ffn_dim"), ("hidden_act", "activation_function")),
        prefix="model.",
    )


def falcon(config: HfConfig) -> Family:
    """Sequential, parallel with one norm, or (the new architecture) with two; ALiBi slopes scale with the scores."""
    new, alibi = config.flag("new_decoder_architecture", False), config.flag("alibi", False)
    two = new and config.integer("num_ln_in_parallel_attn", 2) == 2
    parallel = new or config.flag("parallel_attn", True)
    names = without(BLOOM, "embed_norm") | ({"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"} if two else {})
    if parallel and not two:
        names = without(names, "mlp_norm")

    def key_value_heads(c: HfConfig, layers: int) -> int:
        return c.integer("num_kv_heads", c.integer("num_attention_heads")) if new else multi_query(c)

    def scaled_slopes(c: HfConfig, layers: int) -> tuple[float, ...]:
        scale = (c.integer("hidden_size") // c.integer("num_attention_heads")) ** -0.5
        return tuple(slope * scale for slope in alibi_slopes(c, layers))

    return Family(
        names,
        {
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-5,
            "activation": "gelu",
            "intermediate_size": four_times,
        },
        {"kv_heads": key_value_heads} | ({"rope": no_rope, "alibi": scaled_slopes} if alibi else {}),
        tuple(f"{role}.bias" for role in ("attn_norm", "mlp_norm", "final_norm") if role in names),
        {"bias": NEOX_BIASES},
        LAYER | {"join": ("parallel_two_norms" if two else "parallel") if parallel else "sequential"},
        (
            ("intermediate_size", "ffn_hidden_size"),
            ("rms_norm_eps", "layer_norm_epsilon"),
            ("hidden_act", "activation"),
        ),
        grouped_qkv=True,
        prefix="transformer.",
    )


def t5(config: HfConfig) -> Family:
    """v1.0 has a plain MLP, v1.1 and FLAN a gated one. Scores are not scaled; a tied head's logits are."""
    gate, _, activation = config.text("feed_forward_proj", "relu").rpartition("-")
    if gate not in ("", "gated"):
        raise config.fail("feed_forward_proj", f"{gate!r} before the activation is not known; known: gated")
    plain = {"up": "2.DenseReluDense.wi", "encoder_up": "1.DenseReluDense.wi"}
    return Family(
        T5 if gate else without(T5, "gate", "encoder_gate") | plain,
        {
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-6,
            "n_positions": 512,
            "num_layers": 6,
            "hidden_act": "gelu_new" if gate and activation == "gelu" else activation,
        },
        {
            "kv_heads": every_head,
            "rope": endless,
            "max_position": twice,
            "encoder": encoder_stack,
            "logit_scale": scaled_output,
        },
        ("relative_bias", "encoder_relative_bias", "encoder_final_norm"),
        facts={"join": "crossed", "attention_scale": 1.0},
        spelling=(
            ("hidden_size", "d_model"),
            ("head_dim", "d_kv"),
            ("intermediate_size", "d_ff"),
            ("num_attention_heads", "num_heads"),
            ("num_hidden_layers", "num_layers"),
            ("num_hidden_layers", "num_decoder_layers"),
            ("rms_norm_eps", "layer_norm_epsilon"),
            ("max_position_embeddings", "n_positions"),
        ),
        aliases={"embed": ("encoder.embed_tokens", "decoder.embed_tokens")},
        skipped=(
            "encoder.embed_tokens.",
            "decoder.embed_tokens.",
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.",
        ),
    )


def mt5(config: HfConfig) -> Family:
    """T5 v1.1 whose logits are not scaled, whatever the file says of its head."""
    family = t5(HfConfig({"feed_forward_proj": "gated-gelu", **config.raw}, config.where))
    read = {name: reader for name, reader in family.read.items() if name != "logit_scale"}
    return replace(family, defaults={**family.defaults, "num_layers": 8}, read=read)
