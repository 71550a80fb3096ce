"""Rows of recent dense decoders whose mathematics other families have: windows, multipliers, sinks, other norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.edges import Edges
from quire.model.families.names import (
    BIAS_FLAGS,
    LLAMA,
    NORM_BIASES,
    POST_NORMS,
    QKV_BIAS,
    naked,
    without,
)
from quire.model.families.query_scale import NO_SCALE, QueryScale
from quire.model.families.readers import every_head, full_first, layer_thetas
from quire.model.families.rope import NO_ROPE, Rope, read_rope
from quire.model.families.row import ACTIVATIONS, Family, layer_kinds, sliding_windows, spec_facts
from quire.model.families.variants import LAYER, granite, granite_facts
from quire.model.spec import Factors, ModelSpec

MINISTRAL_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
                  "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}  # fmt: skip
CWM_ROPE = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
APERTUS = without(LLAMA, "gate") | {
    "attn_norm": "attention_layernorm",
    "mlp_norm": "feedforward_layernorm",
    "xielu_positive": "mlp.act_fn.alpha_p",
    "xielu_negative": "mlp.act_fn.alpha_n",
    "xielu_beta": "mlp.act_fn.beta",
    "xielu_eps": "mlp.act_fn.eps",
}
MODERNBERT = {
    "embed": "model.embeddings.tok_embeddings",
    "embed_norm": "model.embeddings.norm",
    "final_norm": "model.final_norm",
    "head_dense": "lm_head.dense",
    "head_norm": "lm_head.norm",
    "head": "decoder",
    "head_bias": "decoder_bias",
    "layer": "model.layers.{}.",
    "attn_norm": "attn_norm",
    "q": "attn.q_proj",
    "k": "attn.k_proj",
    "v": "attn.v_proj",
    "o": "attn.Wo",
    "mlp_norm": "mlp_norm",
    "gate_up": "mlp.Wi",
    "down": "mlp.Wo",
}


def grown_queries(config: HfConfig, layers: int) -> QueryScale:
    """Queries grow by `llama_4_scaling_beta` times the logarithm of how often the first context has passed."""
    rope = config.child("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    weight = rope.number("llama_4_scaling_beta", None)
    if weight is None:
        return NO_SCALE
    return QueryScale(rope.integer("original_max_position_embeddings"), weight, 0, (True,) * layers)


def iquestcoder(config: HfConfig) -> Family:
    """Llama; what its first code had beside that no released file asks for."""
    for field in ("clip_qkv", "use_sliding_window"):
        if config.raw.get(field):
            raise config.fail(field, "is not supported for this family; remove it if the model does not use it")
    return Family(
        LLAMA,
        {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        flags=BIAS_FLAGS,
    )


def hyperclovax(config: HfConfig) -> Family:
    """Granite whose logits are multiplied, and whose layers' results, with a factor behind it, are normed."""
    usual = config.integer("head_dim", None) or config.integer("hidden_size") // config.integer("num_attention_heads")
    facts = {"attention_scale": config.number("attention_multiplier", usual**-0.5),
             "logit_scale": config.number("logits_scaling", 1.0)}  # fmt: skip
    if not config.flag("use_post_norm", True):
        return Family(LLAMA, flags=BIAS_FLAGS, facts=granite_facts(config) | facts)
    added = Factors(post_norm=config.number("residual_multiplier", 1.0))
    return Family(
        LLAMA | {"attn_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"},
        required=POST_NORMS, flags=BIAS_FLAGS,
        facts=facts | {"join": "post_norm", "factors": added,
                       "embed_scale": config.number("embedding_multiplier", 1.0)},
    )  # fmt: skip


def granite_swa(config: HfConfig) -> Family:
    """Granite with windows, sinks, and a base of its rope for each layer."""
    return replace(
        granite(config),
        names=without(LLAMA, "q_norm", "k_norm") | {"sinks": "self_attn.sinks"},
        defaults={"tie_word_embeddings": True, "num_key_value_heads": 4, "max_position_embeddings": 8192,
                  "sliding_window": 128, "layer_types": full_first(4)},
        read={"windows": sliding_windows, "rope": layer_thetas},
        required=("sinks",),
        rewrites=naked(("self_attn",), ("sinks",)),
    )  # fmt: skip


def kinds_that_turn(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """Layers whose kind has null in `rope_parameters` do not turn."""
    p = config.child("rope_parameters").raw
    still = {kind for kind, own in p.items() if own is None}
    ropes: tuple[Rope, ...] = spec_facts(config)["rope"]
    kinds = layer_kinds(config, layers)
    return tuple(NO_ROPE if kind in still else rope for kind, rope in zip(kinds, ropes, strict=True))


def apertus(config: HfConfig) -> Family:
    """Llama whose MLP has no gate and, unless `hidden_act` says another, an activation with learned numbers."""
    learned = config.text("hidden_act", "xielu") == "xielu"
    numbers = ("xielu_positive", "xielu_negative", "xielu_beta", "xielu_eps")
    return Family(
        APERTUS if learned else without(APERTUS, *numbers),
        {"hidden_act": "xielu", "rms_norm_eps": 1e-5, "max_position_embeddings": 65536,
         "rope_parameters": CWM_ROPE | {"rope_theta": 12e6, "factor": 8.0}},
        required=("q_norm", "k_norm", *(numbers if learned else ())),
        flags=BIAS_FLAGS,
        rewrites=naked((r"mlp\.act_fn",), ("alpha_p", "alpha_n", "beta", "eps")),
    )  # fmt: skip


def swapped(spec: ModelSpec, heads: int) -> NDArray[np.int64]:
    """Rows of `heads` whose halves change places: so a turn by the angle becomes one by its negative."""
    rows: NDArray[np.int64] = np.arange(heads * spec.head_dim, dtype=np.int64)
    return rows.reshape(heads, 2, -1)[:, ::-1].flatten()


def local_ropes(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """ModernBERT's bases: `global_rope_theta` and, where a window is seen, `local_rope_theta`."""
    longest, head_dim = (
        config.integer("max_position_embeddings"),
        config.integer("hidden_size") // config.integer("num_attention_heads"),
    )
    thetas = {
        "full_attention": config.number("global_rope_theta", 160000.0),
        "sliding_attention": config.number("local_rope_theta", 1e4),
    }
    ropes = {
        kind: read_rope(HfConfig({**config.raw, "rope_theta": theta}, config.where), head_dim, longest, kind)
        for kind, theta in thetas.items()
    }
    return tuple(ropes[kind] for kind in layer_kinds(config, layers))


def half_windows(config: HfConfig, layers: int) -> tuple[int, ...]:
    """ModernBERT's windows, half of `local_attention`."""
    size, kinds = config.integer("local_attention", low=2) // 2, layer_kinds(config, layers)
    return tuple(size if kind == "sliding_attention" else 0 for kind in kinds)


def read_head(config: HfConfig, layers: int) -> Edges:
    """The head reads a further layer, whose activation has a field of its own."""
    act = config.text("classifier_activation", "gelu")
    if act not in ACTIVATIONS:
        raise config.fail("classifier_activation", f"{act!r} is not known; known: {', '.join(ACTIVATIONS)}")
    return Edges(bare=True, activation=ACTIVATIONS[act])


MODERNBERT_BIASES = {
    "attention_bias": (*QKV_BIAS, "o.bias"),
    "mlp_bias": ("gate_up.bias", "down.bias"),
    "decoder_bias": ("head_bias",),
    "norm_bias": ("embed_norm.bias", "head_norm.bias", *NORM_BIASES),
    "classifier_bias": ("head_dense.bias",),
}


def modernbert_decoder(config: HfConfig) -> Family:
    """ModernBERT with a causal mask (Weller et al. 2025): the embedding is normed, not what the first layer reads."""
    return Family(
        MODERNBERT,
        {"tie_word_embeddings": True, "norm_eps": 1e-5, "hidden_activation": "gelu", "max_position_embeddings": 8192,
         "local_attention": 128, "decoder_bias": True,
         "layer_types": full_first(config.integer("global_attn_every_n_layers", 3))},
        {"kv_heads": every_head, "rope": local_ropes, "windows": half_windows, "edges": read_head},
        ("embed_norm", "head_dense", "head_norm"),
        MODERNBERT_BIASES,
        LAYER,
        (("rms_norm_eps", "norm_eps"), ("hidden_act", "hidden_activation")),
        rewrites=(Rewrite(r"decoder\.bias", "decoder_bias.weight", release="decoder.bias"),),
    )  # fmt: skip


NEWER_DENSE: dict[str, Family | Callable[[HfConfig], Family]] = {
    "cwm": Family(
        LLAMA,
        {
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_parameters": CWM_ROPE,
            "sliding_window": 8192,
            "layer_types": full_first(4),
        },
        {"windows": sliding_windows},
        flags=BIAS_FLAGS,
    ),
    "ministral3": Family(
        LLAMA,
        {
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144,
            "rope_parameters": MINISTRAL_ROPE,
        },
        {"windows": sliding_windows, "query_scale": grown_queries},
    ),
    "jais2": Family(
        without(LLAMA, "gate", "q_norm", "k_norm"),
        {
            "hidden_act": "relu2",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "attention_bias": True,
            "mlp_bias": True,
        },
        required=NORM_BIASES,
        flags=BIAS_FLAGS,
        facts=LAYER,
        spelling=(("rms_norm_eps", "layer_norm_eps"),),
    ),
    "iquestcoder": iquestcoder,
    "hyperclovax": hyperclovax,
    "granite_swa": granite_swa,
    "apertus": apertus,
    "bitnet": Family(
        without(LLAMA, "q_norm", "k_norm") | {"o_norm": "self_attn.attn_sub_norm", "down_norm": "mlp.ffn_sub_norm"},
        {"hidden_act": "relu2", "num_key_value_heads": 5, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
        required=("o_norm", "down_norm"),
        flags=BIAS_FLAGS,
    ),
    "nanochat": Family(
        without(LLAMA, "gate", "attn_norm", "mlp_norm", "final_norm", "q_norm", "k_norm")
        | {"up": "mlp.fc1", "down": "mlp.fc2"},
        {"hidden_act": "relu2", "final_logit_softcapping": 15.0},
        {
            "unit_norms": lambda c, layers: (True,) * layers,
            "output_softcap": lambda c, layers: c.number("final_logit_softcapping", 0.0),
        },
        flags={"attention_bias": (*QKV_BIAS, "o.bias")},
        facts={"norm": "unit", "edges": Edges(normed=True)},
        orders={"q": lambda s: swapped(s, s.heads), "k": lambda s: swapped(s, s.kv_heads)},
    ),
    "cohere_compass_text": Family(
        without(LLAMA, "mlp_norm", "q_norm", "k_norm"),
        {"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "sliding_window": 4096},
        {"logit_scale": lambda c, layers: c.number("logit_scale", 1.0), "windows": sliding_windows,
         "rope": kinds_that_turn},
        flags=BIAS_FLAGS,
        facts=LAYER | {"join": "parallel"},
        spelling=(("rms_norm_eps", "layer_norm_eps"),),
    ),
    "hunyuan_v1_dense": Family(
        LLAMA | {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
        {"rms_norm_eps": 1e-5, "fixed_alpha": True},
        required=("q_norm", "k_norm"),
        flags=BIAS_FLAGS,
        facts={"late_norms": True},
    ),
    "modernbert-decoder": modernbert_decoder,
}  # fmt: skip
