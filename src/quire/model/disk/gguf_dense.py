"""GGUF's architectures of decoders with one MLP a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_names import LOG_MULTIPLIER, MULTIPLIERS, TEMPERATURE, WIDTH, WINDOW
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.spec import ModelSpec

BIASED_QKV = (".attn_q.bias", ".attn_qkv.bias")
"""In names of tensors where queries have biases, fused or not."""
EPSILON = (("layer_norm_eps", "layer_norm_epsilon"),)
CLIPPED = {"clip_qkv": "attention.clamp_kqv"}
QKV = {"qkv": ("q", "k", "v")}
PARALLEL = {"use_parallel_residual": "use_parallel_residual"}
SECTIONS = "rope.dimension_sections"
"""How many pairs turn by time, height and width. Of text, all turn by one position."""
ALIBI_LAYERS = 40
"""Layers of the size of Baichuan that has ALiBi, which no key records."""


def norms_of_falcon(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """One norm for attention and MLP, or two."""
    return {"num_ln_in_parallel_attn": 2 if has(".attn_norm_2.") else 1}


def positions_of_baichuan(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """The larger size has no field for positions that turn."""
    large = raw["num_hidden_layers"] == ALIBI_LAYERS
    return {"max_position_embeddings": None, "model_max_length": raw["max_position_embeddings"]} if large else {}


def slopes_of_refact(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """ALiBi, as in Baichuan's larger size."""
    return {"max_position_embeddings": None, "model_max_length": raw["max_position_embeddings"]}


def join_of_stablelm(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Parallel blocks have one norm; the key of older files may say otherwise."""
    return {"use_parallel_residual": not has(".ffn_norm.")}


def slopes_of_mpt(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Slopes up to 0 say that there are none."""
    attention = raw.get("attn_config") or {}
    return {"attn_config": attention if attention.get("alibi_bias_max") else attention | {"alibi": False}}


def scales_of_minicpm(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Older files have no multipliers, which are those of the 2B size (MiniCPM, Hu et al. 2024)."""
    usual = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / raw["num_hidden_layers"] ** 0.5,
        "logits_scaling": raw["hidden_size"] / 256,
    }
    found = {name: value for name, value in usual.items() if raw.get(name) is None}
    return found | {"attention_multiplier": float(raw["head_dim"]) ** -0.5}


def multipliers_of_minicpm(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Granite's fields of a MiniCPM's."""
    layers, hidden = raw["num_hidden_layers"], raw["hidden_size"]
    return {
        "embedding_multiplier": float(raw.get("scale_emb", 1.0)),
        "residual_multiplier": raw.get("scale_depth", 1.0) / layers**0.5,
        "logits_scaling": hidden / raw.get("dim_model_base", 1),
    }


def thetas_of_granite(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """The base of each layer's rope, 0 where it does not turn."""
    turning = raw.get("turning")
    return {} if turning is None else {"layer_rope_theta": [raw["rope_theta"] if on else 0 for on in turning]}


def turns_of_granite(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers turn."""
    thetas = raw.get("layer_rope_theta")
    return {} if thetas is None else {"turning": [theta != 0 for theta in thetas]}


def rope_of_hunyuan(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """A base that is multiplied by a power of alpha."""
    alpha = raw.get("rope_alpha")
    return {} if alpha is None else {"rope_scaling": {"rope_type": "dynamic", "alpha": alpha, "factor": 1.0}}


def turns_of_muse(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Layers with a window turn."""
    theta, kinds = raw["rope_theta"], raw.get("layer_types")
    return {} if kinds is None else {"layer_rope_theta": [theta * (kind == "sliding_attention") for kind in kinds]}


def multipliers_of_muse(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp knows no defaults of."""
    usual = {"output_multiplier": 26**-0.5, "final_logit_softcapping": 20.0}
    return {name: float(raw.get(name, value)) for name, value in usual.items()}


def factors_of_queries(spec: ModelSpec) -> NDArray[np.float32]:
    """What multiplies normed queries, which files have as weights of the norm."""
    return np.full(spec.head_dim, spec.attention_scale * spec.head_dim**0.5, np.float32)


def growth_of_ministral3(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """How queries grow with their position; files that do not say are of Mistral Small 3, a Llama."""
    if raw.get("temperature") is None:
        return {"model_type": "llama"}
    own = {"mscale": 1.0, "mscale_all_dim": raw.get("log_multiplier"), "llama_4_scaling_beta": raw["temperature"]}
    return {"rope_scaling": {**(raw.get("rope_scaling") or {}), **own}}


def temperature_of_ministral3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of what queries grow by, of config.json."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    named = {"temperature": "llama_4_scaling_beta", "log_multiplier": "mscale_all_dim"}
    return {ours: float(scaling[theirs]) for ours, theirs in named.items() if scaling.get(theirs) is not None}


DENSE: dict[str, Architecture] = {
    "granite": Architecture("granite", interleaved=True, fields=MULTIPLIERS),
    "granite_swa": Architecture(
        "granite_swa",
        interleaved=True,
        extra=WINDOW,
        fields=MULTIPLIERS,
        lists={"turning": "attention.rope_pattern"},
        spelling=(("shared_expert_intermediate_size", "shared_intermediate_size"),),
        rewrites=(Rewrite(r"(blk\.\d+)\.ffn_up_shexp\.(\w+)", r"\1.ffn_{}_shexp.\2", parts=("gate", "up")),),
        further=thetas_of_granite,
        tell=turns_of_granite,
        mixture="granitemoe_swa",
        names={"shared_gate_up": "ffn_up_shexp"},
        parted={"shared_gate_up": ("shared_gate_up",)},
    ),
    "minicpm": Architecture(
        "granite",
        interleaved=True,
        fields=MULTIPLIERS,
        further=scales_of_minicpm,
        also=("minicpm",),
        tell=multipliers_of_minicpm,
    ),
    "command-r": Architecture(
        "cohere", interleaved=True, fields={"logit_scale": "logit_scale"}, told={"use_qk_norm": ".attn_q_norm."}
    ),
    "cohere2": Architecture("cohere2", interleaved=True, extra=WINDOW, fields={"logit_scale": "logit_scale"}),
    "glm4": Architecture("glm4", interleaved=True, told={"attention_bias": BIASED_QKV}),
    "chatglm": Architecture("glm", interleaved=True, told={"attention_bias": BIASED_QKV}, also=("chatglm",)),
    "olmo": Architecture("olmo", interleaved=True, fields=CLIPPED, spelling=(("layer_norm_eps", "rms_norm_eps"),)),
    "olmo2": Architecture("olmo2", extra=WINDOW, windowed="olmo3"),
    "smollm3": Architecture("smollm3", interleaved=True),
    "starcoder2": Architecture(
        "starcoder2", extra=WINDOW[:1], told={"use_bias": BIASED_QKV}, spelling=(("layer_norm_eps", "norm_epsilon"),)
    ),
    "starcoder": Architecture("gpt_bigcode", spelling=EPSILON),
    "exaone4": Architecture("exaone4", extra=WINDOW),
    "ernie4_5": Architecture("ernie4_5", interleaved=True, told={"use_bias": BIASED_QKV}),
    "falcon": Architecture(
        "falcon",
        facts={"new_decoder_architecture": True},
        spelling=(*EPSILON, ("num_key_value_heads", "num_kv_heads"), ("intermediate_size", "ffn_hidden_size")),
        told={"bias": ".attn_qkv.bias"},
        joined={"parallel_two_norms": {"attn_norm": "attn_norm_2", "mlp_norm": "attn_norm"}},
        further=norms_of_falcon,
    ),
    "gpt2": Architecture("gpt2", spelling=EPSILON, also=("gpt-sw3",)),
    "gptj": Architecture("gptj", interleaved=True, fields={"rotary_dim": "rope.dimension_count"}, spelling=EPSILON),
    "gptneox": Architecture(
        "gpt_neox",
        fields=PARALLEL,
        spelling=(("partial_rotary_factor", "rotary_pct"), ("rope_theta", "rotary_emb_base")),
        told={"attention_bias": BIASED_QKV},
    ),
    "bloom": Architecture("bloom", spelling=EPSILON),
    "mpt": Architecture(
        "mpt",
        fields={
            "attn_config.alibi_bias_max": "attention.max_alibi_bias",
            "attn_config.clip_qkv": "attention.clamp_kqv",
        },
        spelling=EPSILON,
        further=slopes_of_mpt,
    ),
    "stablelm": Architecture(
        "stablelm",
        fields=PARALLEL,
        told={"use_qkv_bias": BIASED_QKV, "qk_layernorm": ".attn_q_norm."},
        further=join_of_stablelm,
    ),
    "nemotron": Architecture("nemotron", spelling=(("layer_norm_eps", "norm_eps"),)),
    "internlm2": Architecture("internlm2", interleaved=True, parted=QKV),
    "baichuan": Architecture(
        "baichuan",
        interleaved=True,
        parted=QKV,
        further=positions_of_baichuan,
        stored=lambda spec: replace(spec, unit_head=False),
    ),
    "seed_oss": Architecture(
        "seed_oss",
        names={"mlp_norm": "post_attention_norm"},
        told={"attention_bias": BIASED_QKV, "attention_out_bias": ".attn_output.bias", "mlp_bias": ".ffn_gate.bias"},
    ),
    "arcee": Architecture("arcee", interleaved=True),
    "exaone": Architecture("exaone"),
    "orion": Architecture("orion", spelling=(("layer_norm_eps", "rms_norm_eps"),)),
    "qwen": Architecture(
        "qwen",
        spelling=(("rms_norm_eps", "layer_norm_epsilon"), ("max_position_embeddings", "seq_length")),
        tell=lambda raw: {WIDTH: raw[WIDTH]},
    ),
    "jais2": Architecture("jais2", told={"attention_bias": BIASED_QKV, "mlp_bias": ".ffn_up.bias"}),
    "apertus": Architecture(
        "apertus",
        vectors={
            "xielu_positive": "xielu.alpha_p",
            "xielu_negative": "xielu.alpha_n",
            "xielu_beta": "xielu.beta",
            "xielu_eps": "xielu.eps",
        },
    ),
    "bitnet": Architecture("bitnet", facts={"hidden_act": "silu"}),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "xverse": Architecture("xverse", interleaved=True),
    "plamo": Architecture("plamo", required=("head",)),
    "muse-glimmer": Architecture(
        "muse_glimmer_text",
        interleaved=True,
        extra=WINDOW,
        facts={"qk_scale_factor": 1.0, "weighted_qk_norm": True},
        fields={"output_multiplier": "logit_scale", "final_logit_softcapping": "final_logit_softcapping"},
        required=("q_norm", "k_norm", "head"),
        further=turns_of_muse,
        tell=multipliers_of_muse,
        made={"q_norm": factors_of_queries, "k_norm": lambda spec: np.ones(spec.head_dim, np.float32)},
        stored=lambda spec: replace(spec, attention_scale=spec.head_dim**-0.5, unit_norms=()),
    ),
    "mistral3": Architecture(
        "ministral3",
        interleaved=True,
        fields={"temperature": TEMPERATURE, "log_multiplier": LOG_MULTIPLIER},
        further=growth_of_ministral3,
        tell=temperature_of_ministral3,
    ),
}
LLAMA = Architecture("llama", read_only=True)
READ = {
    "pangu-embedded": LLAMA,
    "qwen2vl": Architecture("qwen2", extra=(SECTIONS,), read_only=True),
    "qwen3vl": Architecture("qwen3", extra=(SECTIONS, "n_deepstack_layers"), read_only=True),
    "paddleocr": replace(DENSE["ernie4_5"], interleaved=False, extra=(SECTIONS,), read_only=True),
    "hunyuan_vl": Architecture(
        "hunyuan_v1_dense",
        extra=(SECTIONS,),
        fields={"rope_alpha": "rope.scaling.alpha"},
        further=rope_of_hunyuan,
        read_only=True,
    ),
    "codeshell": replace(DENSE["starcoder2"], read_only=True),
    "refact": Architecture("baichuan", further=slopes_of_refact, read_only=True),
}
"""Architectures that are not written: of models that are another row's, in files without images, whose folders have no
row of their own."""
