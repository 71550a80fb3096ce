"""The rows of the table of families that have experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.families.names import (
    ALL_MLP_BIAS,
    BIAS_FLAGS,
    CORRECTION,
    ERNIE_CORRECTION,
    GPT_OSS_WRITTEN,
    LLAMA,
    MIXTRAL_WRITTEN,
    NEXTN,
    NORM_BIASES,
    QKV_BIAS,
    STACKED,
    without,
)
from quire.model.families.readers import (
    LATENT_READS,
    alternating,
    read_moe,
    sparse_layers,
)
from quire.model.families.rope import Rope, read_rope
from quire.model.families.row import Family, sliding_windows
from quire.model.spec import MoE
from quire.ops.experts import Clamp, Routing

EXPERTS = {
    "router": "mlp.gate",
    "expert_gate": "mlp.experts.{}.gate_proj",
    "expert_up": "mlp.experts.{}.up_proj",
    "expert_down": "mlp.experts.{}.down_proj",
}
SHARED_EXPERT = {
    "shared_gate": "mlp.shared_expert.gate_proj",
    "shared_up": "mlp.shared_expert.up_proj",
    "shared_down": "mlp.shared_expert.down_proj",
    "shared_switch": "mlp.shared_expert_gate",
}
MIXTRAL = without(LLAMA, "gate", "up", "down", "q_norm", "k_norm") | {
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.{}.w1",
    "expert_up": "block_sparse_moe.experts.{}.w3",
    "expert_down": "block_sparse_moe.experts.{}.w2",
}
GPT_OSS = (
    without(LLAMA, "gate", "up", "down", "q_norm", "k_norm")
    | {
        "sinks": "self_attn.sinks",
        "router": "mlp.router",
    }
    | {role: name for role, name in EXPERTS.items() if role != "router"}
)
LOCAL = (("num_experts", "num_local_experts"),)
ROUTED = (("num_experts", "n_routed_experts"),)


def phimoe_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """LongRoPE whose factor of cosines and sines is given, for short and for long contexts."""
    field = "rope_scaling" if config.has("rope_scaling") else "rope_parameters"
    p = config.child(field)
    if p.has("short_mscale"):
        factor = p.number("short_mscale")
        if p.number("long_mscale") != factor:
            raise p.fail(
                "long_mscale", f"is not short_mscale {factor}; a factor that changes with length is not supported"
            )
        config = HfConfig({**config.raw, field: {**p.raw, "attention_factor": factor}}, config.where)
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    return (read_rope(config, head_dim, config.integer("max_position_embeddings"), "full_attention"),) * layers


def phimoe_experts(config: HfConfig, layers: int) -> MoE:
    """Two experts by sparsemixer, `router_jitter_noise` apart at most."""
    jitter = config.number("router_jitter_noise", 0.01, low=-1)
    return read_moe("sparsemixer", False, jitter=jitter)(config, layers)


def gpt_oss_experts(config: HfConfig, layers: int) -> MoE:
    """A softmax over the logits of the chosen; an activation of its own."""
    experts = config.integer("num_experts", high=1024)
    routing = Routing(experts, config.integer("num_experts_per_tok", high=experts), renormalize=True)
    clamp = Clamp(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0))
    return MoE(routing, config.integer("intermediate_size", high=1 << 24), sparse_layers(config, layers), clamp=clamp)


LATENTS = {
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_b": "self_attn.kv_b_proj",
}
SHARED = {
    "shared_gate": "mlp.shared_experts.gate_proj",
    "shared_up": "mlp.shared_experts.up_proj",
    "shared_down": "mlp.shared_experts.down_proj",
}
SMALL_QUERIES = ("q_a", "q_a_norm", "q_b")
LATENT_SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""DeepSeek's, which most others with latent attention have."""


def deepseek(config: HfConfig, defaults: dict[str, Any], moe: Callable[[HfConfig, int], MoE]) -> Family:
    """Latent attention, queries by way of a smaller space unless `q_lora_rank` is null; experts behind dense layers.

    Layers past the last predict tokens further ahead; the first of them may draft.
    """
    if config.integer("moe_layer_freq", 1) != 1:
        raise config.fail("moe_layer_freq", "is not supported; only 1 is")
    straight = "q_lora_rank" in config.raw and not config.has("q_lora_rank")
    names = without(LLAMA, "k", "v", "q_norm", "k_norm", *(() if straight else ("q",))) | EXPERTS | SHARED | LATENTS
    return Family(
        without(names, *SMALL_QUERIES) if straight else names,
        defaults | {"head_dim": lambda c: c.integer("qk_rope_head_dim"), "q_lora_rank": None if straight else 1536},
        LATENT_READS | {"moe": moe},
        ("kv_a", "kv_a_norm", "kv_b", *(() if straight else SMALL_QUERIES)),
        {"attention_bias": ("kv_a.bias", "o.bias", *(() if straight else ("q_a.bias",)))},
        spelling=ROUTED,
        skipped=layers_ahead(config),
        rewrites=STACKED,
    )


def layers_ahead(config: HfConfig) -> tuple[str, ...]:
    """Beginnings of the names of layers past the last, which predict tokens further ahead."""
    layers, ahead = config.integer("num_hidden_layers", high=1024), config.integer("num_nextn_predict_layers", 0, low=0)
    return tuple(f"model.layers.{layers + i}." for i in range(ahead))


def shared_width(config: HfConfig) -> int:
    """The shared experts are one of `n_shared_experts` times the width."""
    return config.integer("n_shared_experts", 0, low=0, high=1024) * config.integer("moe_intermediate_size")


def deepseek_v2_experts(config: HfConfig, layers: int) -> MoE:
    """Softmax scores; the best group is the one with the best expert."""
    if config.flag("norm_topk_prob", False):
        raise config.fail("norm_topk_prob", "true is not supported for this family: releases of its code differ in it")
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.fail("topk_method", f"{method!r} is not known; known: greedy, group_limited_greedy")
    return grouped_moe(config, layers, "softmax", False, 1, limited=method != "greedy")


def deepseek_v2(config: HfConfig) -> Family:
    """Experts by softmax scores, chosen among groups or among all."""
    own = {"max_position_embeddings": 2048, "n_routed_experts": 64, "n_shared_experts": 2,
           "moe_intermediate_size": 1407}  # fmt: skip
    return deepseek(config, LATENT_SIZES | own, deepseek_v2_experts)


def sigmoid_experts(renormalize: bool) -> Callable[[HfConfig, int], MoE]:
    """Sigmoid scores, chosen with a correction bias; a group counts by its best two. `renormalize` is the default."""

    def moe(c: HfConfig, layers: int) -> MoE:
        return grouped_moe(c, layers, "sigmoid", c.flag("norm_topk_prob", renormalize), 2, limited=True)

    return moe


CORRECTED = {"router_bias": "mlp.gate_correction"}


def deepseek_v3(config: HfConfig) -> Family:
    """Experts by sigmoid scores."""
    own = {"max_position_embeddings": 4096, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
           "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 8,
           "topk_group": 4}  # fmt: skip
    family = deepseek(config, LATENT_SIZES | own, sigmoid_experts(True))
    return replace(
        family,
        names={**family.names, **CORRECTED},
        required=(*family.required, "router_bias"),
        rewrites=(CORRECTION, *STACKED),
        mtp=NEXTN,
    )


def glm4_moe(config: HfConfig) -> Family:
    """Plain attention, half of a head rotated, with the experts of DeepSeek-V3."""
    return Family(
        LLAMA | EXPERTS | SHARED | CORRECTED,
        {"num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
         "max_position_embeddings": 131072, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
         "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
        {"moe": sigmoid_experts(True)},
        ("router_bias",),
        {"attention_bias": QKV_BIAS, "use_qk_norm": ("q_norm", "k_norm")},
        spelling=ROUTED, skipped=layers_ahead(config), rewrites=(CORRECTION, *STACKED), mtp=NEXTN,
    )  # fmt: skip


def ernie_experts(config: HfConfig, layers: int) -> MoE:
    """Softmax scores, chosen with a correction bias, in every `moe_layer_interval`-th layer of a range."""
    least = config.number("moe_norm_min", 1e-12)
    if least > 1e-6:
        raise config.fail("moe_norm_min", f"is {least}; sums of weights so large are not bounded here, at most 1e-6 is")
    first, step = config.integer("moe_layer_start_index", 1, low=0), config.integer("moe_layer_interval", 1)
    last = config.integer("moe_layer_end_index", -1, low=-1)
    sparse = tuple(first <= i <= (last if last >= 0 else layers) and (i + 1) % step == 0 for i in range(layers))
    return replace(read_moe(renormalize=True)(config, layers), sparse=sparse, shared=shared_width(config))


def grouped_moe(c: HfConfig, layers: int, score: str, renormalize: bool, best: int, limited: bool) -> MoE:
    """Experts chosen among the best `topk_group` of `n_group` groups, or among all when not `limited`."""
    groups = c.integer("n_group", 1, high=256) if limited else 1
    chosen = c.integer("topk_group", 1, high=groups) if limited else 1
    experts = c.integer("num_experts", high=1024)
    if experts % groups or experts // groups < best or experts // groups * chosen < c.integer("num_experts_per_tok"):
        raise c.fail("n_group", f"is {groups}, of which {chosen} take part: that does not fit {experts} experts")
    moe = read_moe(score, renormalize, groups=groups, top_groups=chosen, group_best=best)(c, layers)
    return replace(moe, shared=shared_width(c))


MIXTURES: dict[str, Family | Callable[[HfConfig], Family]] = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "glm4_moe": glm4_moe,
    "ernie4_5_moe": Family(
        without(LLAMA, "q_norm", "k_norm") | EXPERTS | SHARED | CORRECTED,
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
         "max_position_embeddings": 131072, "moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_k": 6,
         "moe_num_shared_experts": 2},
        {"moe": ernie_experts},
        ("router_bias",),
        {"use_bias": (*QKV_BIAS, "o.bias", "head.bias", *ALL_MLP_BIAS)},
        {"interleaved_rope": True},
        (("num_experts", "moe_num_experts"), ("num_experts_per_tok", "moe_k"),
         ("n_shared_experts", "moe_num_shared_experts")),
        skipped=("model.mtp_",),
        rewrites=(ERNIE_CORRECTION, *STACKED),
    ),
    "dots1": Family(
        LLAMA | EXPERTS | SHARED | CORRECTED,
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "moe_intermediate_size": 1408,
        },
        {"windows": sliding_windows, "moe": sigmoid_experts(False)},
        ("router_bias", "q_norm", "k_norm"),
        BIAS_FLAGS,
        spelling=ROUTED,
        rewrites=(CORRECTION, *STACKED),
    ),
    "mixtral": Family(
        MIXTRAL,
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        {"windows": sliding_windows, "moe": read_moe(renormalize=True)},
        spelling=LOCAL,
        rewrites=MIXTRAL_WRITTEN,
    ),
    "qwen2_moe": Family(
        without(LLAMA, "q_norm", "k_norm") | EXPERTS | SHARED_EXPERT,
        {"num_key_value_heads": 16, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
         "max_position_embeddings": 32768, "qkv_bias": True, "num_experts": 60, "num_experts_per_tok": 4,
         "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        {"windows": sliding_windows, "moe": read_moe()},
        ("shared_switch",),
        {"qkv_bias": QKV_BIAS},
        spelling=LOCAL,
        rewrites=STACKED,
    ),
    "qwen3_moe": Family(
        LLAMA | EXPERTS,
        {"head_dim": 128, "num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 4096,
         "max_position_embeddings": 32768, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        {"windows": sliding_windows, "moe": read_moe()},
        ("q_norm", "k_norm"),
        BIAS_FLAGS,
        spelling=LOCAL,
        rewrites=STACKED,
    ),
    "olmoe": Family(
        without(LLAMA, "gate", "up", "down", "q_norm", "k_norm")
        | EXPERTS
        | {"q_row_norm": "self_attn.q_norm", "k_row_norm": "self_attn.k_norm"},
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8},
        {"clip_qkv": lambda config, layers: config.number("clip_qkv", 0.0), "moe": read_moe()},
        ("q_row_norm", "k_row_norm"),
        BIAS_FLAGS,
        rewrites=STACKED,
    ),
    "phimoe": Family(
        MIXTRAL,
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072,
         "num_local_experts": 16, "num_experts_per_tok": 2},
        {"windows": sliding_windows, "rope": phimoe_rope, "moe": phimoe_experts},
        NORM_BIASES,
        BIAS_FLAGS | {"lm_head_bias": ("head.bias",)},
        {"norm": "layer"},
        LOCAL,
        rewrites=MIXTRAL_WRITTEN,
    ),
    "gpt_oss": Family(
        GPT_OSS,
        {"head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
         "max_position_embeddings": 131072, "sliding_window": 128, "layer_types": alternating(2),
         "attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4},
        {"windows": sliding_windows, "moe": gpt_oss_experts},
        ("sinks", "router.bias", "expert_gate.bias", "expert_up.bias", "expert_down.bias"),
        BIAS_FLAGS,
        spelling=LOCAL,
        rewrites=GPT_OSS_WRITTEN,
    ),
}  # fmt: skip
