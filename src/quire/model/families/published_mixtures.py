"""Rows of families with experts whose code was first published beside their files: DeepSeek's first, Ling, Hunyuan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from quire.model.disk.hf_config import HfConfig
from quire.model.families.mixtures import CORRECTED, EXPERTS, ROUTED, SHARED, grouped_moe, layers_ahead, sigmoid_experts
from quire.model.families.names import BIAS_FLAGS, FINAL_NEXTN, LLAMA, STACKED, without
from quire.model.families.newer_mixtures import corrections_called
from quire.model.families.readers import only, read_moe
from quire.model.families.row import Family
from quire.model.spec import MoE


def softmax_experts(config: HfConfig, layers: int) -> MoE:
    """Softmax scores of all experts, and shared ones."""
    return grouped_moe(config, layers, "softmax", config.flag("norm_topk_prob"), 1, limited=False)


def deepseek_v1(config: HfConfig) -> Family:
    """Plain attention, softmax scores, shared experts (DeepSeek-AI 2024, "DeepSeekMoE"), as its published code."""
    if config.text("scoring_func", "softmax") != "softmax" or config.integer("moe_layer_freq", 1) != 1:
        raise config.fail("scoring_func", "and moe_layer_freq: only softmax and 1 are supported")
    return Family(
        without(LLAMA, "q_norm", "k_norm") | EXPERTS | SHARED,
        {"max_position_embeddings": 2048, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
         "moe_intermediate_size": 1407, "norm_topk_prob": False},
        {"moe": softmax_experts},
        flags={"attention_bias": BIAS_FLAGS["attention_bias"]},
        spelling=ROUTED,
        rewrites=STACKED,
    )  # fmt: skip


BAILING = without(LLAMA, "q", "k", "v") | EXPERTS | SHARED | {
    "embed": "model.word_embeddings",
    "qkv": "attention.query_key_value",
    "q_norm": "attention.query_layernorm",
    "k_norm": "attention.key_layernorm",
    "o": "attention.dense",
    "router_bias": CORRECTED["router_bias"],
}  # fmt: skip


def second_generation(config: HfConfig) -> bool:
    """Whether a Ling or Ring is of the second generation, some of whose files have the first's model type."""
    named = config.text("model_type") == "bailing_moe_v2" or "BailingMoeV2ForCausalLM" in config.texts("architectures")
    return named or config.text("score_function", "softmax") == "sigmoid"


def bailing(config: HfConfig) -> Family:
    """Ling and Ring. The second generation has sigmoid scores, a correction bias, and norms of queries and keys."""
    only(config, norm_head=False, norm_softmax=False, multi_gate=False)
    second, own = second_generation(config), ("q_norm", "k_norm", "router_bias")
    return Family(
        BAILING if second else without(BAILING, *own),
        {"num_experts_per_tok": 8, "num_shared_experts": 0, "norm_topk_prob": True, "first_k_dense_replace": 0,
         "max_position_embeddings": 32768, "rope_theta": 6e5},
        {"moe": sigmoid_experts(True) if second else softmax_experts},
        own if second else (),
        {"use_qkv_bias": ("qkv.bias",), "use_bias": ("o.bias",)},
        spelling=(("n_shared_experts", "num_shared_experts"),), skipped=layers_ahead(config),
        rewrites=(corrections_called("mlp.gate.expert_bias"), *STACKED), mtp=FINAL_NEXTN if second else None,
    )  # fmt: skip


HUNYUAN = LLAMA | EXPERTS | {
    "q_norm": "self_attn.query_layernorm",
    "k_norm": "self_attn.key_layernorm",
    "router": "mlp.gate.wg",
    **{role: name.replace("shared_experts", "shared_mlp") for role, name in SHARED.items()},
}  # fmt: skip


def of_all_layers(config: HfConfig, field: str, default: int) -> int:
    """A number that may be given for each layer, the same for all."""
    value = config.raw.get(field)
    each = value if isinstance(value, list) else [default if value is None else value]
    if not each or any(type(number) is not int or number != each[0] for number in each):
        raise config.fail(field, f"is {value!r:.40}, needs one number, the same for all layers")
    return HfConfig({field: each[0]}, config.where).integer(field, high=1 << 24)


def hunyuan_experts(config: HfConfig, layers: int) -> MoE:
    """Softmax scores that sum to 1, and a shared expert, all as wide as `intermediate_size`."""
    width = config.integer("intermediate_size", high=1 << 24)
    for field, known in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if of_all_layers(config, field, known) != known:
            raise config.fail(field, f"is not {known}, which is what the code of this family computes with")
    counts = {
        "num_experts": of_all_layers(config, "num_experts", 1),
        "num_experts_per_tok": of_all_layers(config, "moe_topk", 1),
        "moe_intermediate_size": width,
    }
    return replace(read_moe(renormalize=True)(HfConfig({**config.raw, **counts}, config.where), layers), shared=width)


def hunyuan_moe(config: HfConfig) -> Family:
    """Norms of heads behind the rope, and in every layer a shared expert beside the chosen."""
    if config.flag("use_cla", False):
        raise config.fail("use_cla", "true, keys and values of another layer, is not supported for this family")
    return Family(
        HUNYUAN,
        {"rms_norm_eps": 1e-5, "fixed_alpha": True},
        {"moe": hunyuan_experts},
        ("q_norm", "k_norm"),
        {"attention_bias": BIAS_FLAGS["attention_bias"]},
        {"late_norms": True},
        rewrites=STACKED,
    )


PUBLISHED_MIXTURES: Mapping[str, Family | Callable[[HfConfig], Family]] = {
    "deepseek": deepseek_v1,
    "bailing_moe": bailing,
    "bailing_moe_v2": bailing,
    "hunyuan_v1_moe": hunyuan_moe,
}
