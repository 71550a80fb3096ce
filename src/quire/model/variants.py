"""Rows of the table that are functions: families whose tensors or joins depend on config.json."""

from __future__ import annotations

from quire.model.family import Family
from quire.model.hf_config import HfConfig
from quire.model.names import BIAS_FLAGS, BLOOM, LLAMA, NEOX_BIASES, NORM_BIASES, OPT, QKV_BIAS, without
from quire.model.readers import alibi_slopes, every_head, four_times, multi_query, no_rope

LAYER = {"norm": "layer"}


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


def stablelm(config: HfConfig) -> Family:
    """Its parallel blocks have one norm."""
    parallel = config.flag("use_parallel_residual", False)
    return Family(
        without(LLAMA, "q_norm", "k_norm", *(("mlp_norm",) if parallel else ())),
        {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096},
        flags={"use_qkv_bias": QKV_BIAS},
        required=("attn_norm.bias", "final_norm.bias", *(() if parallel else ("mlp_norm.bias",))),
        facts=LAYER | {"join": "parallel" if parallel else "sequential"},
        spelling=(("rms_norm_eps", "layer_norm_eps"),),
    )


def opt(config: HfConfig) -> Family:
    """Learned positions start at row 2."""
    if not config.flag("do_layer_norm_before", True):
        raise config.fail("do_layer_norm_before", "false (norms after the addition) is not supported")
    biases = (*QKV_BIAS, "o.bias", "up.bias", "down.bias") if config.flag("enable_bias", True) else ()
    affine = config.flag("layer_norm_elementwise_affine", True)
    return Family(
        OPT if affine else without(OPT, "attn_norm", "mlp_norm", "final_norm"),
        {"tie_word_embeddings": True, "activation_function": "relu", "rms_norm_eps": 1e-5},
        {"kv_heads": every_head, "rope": no_rope},
        ("positions", *biases, *(NORM_BIASES if affine else ())),
        facts={"norm": "layer" if affine else "plain", "position_offset": 2},
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
