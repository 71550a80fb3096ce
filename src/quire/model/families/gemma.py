"""Gemma 4: layers of two kinds, which differ in the number and the size of their heads.

Team Gemma 2026. Layers that see everything have larger heads, of which a part turns, and may use their keys as values;
the last layers may read keys and values of earlier ones and have MLPs twice as wide. What a layer adds is normed, and
the stream is multiplied by a number of each layer's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.families.names import BIAS_FLAGS, GEMMA, POST_NORMS, STACKED, naked
from quire.model.families.readers import alternating, embed_scale
from quire.model.families.rope import Rope, read_rope
from quire.model.families.row import Family, layer_kinds, shared_layers, sliding_windows
from quire.model.layer_sizes import LayerInputs, LayerSizes
from quire.model.spec import NO_EXPERTS, MoE
from quire.ops.experts import Routing

FULL = "full_attention"


def gemma4_kinds(config: HfConfig) -> list[str]:
    """`layer_types` where the file has none: every sixth layer sees everything, and the last one."""
    return [*alternating(6)(config)[:-1], FULL]


def gemma4_sizes(config: HfConfig, layers: int) -> tuple[LayerSizes, ...]:
    """Sizes of each layer: `per_layer_config` has those that differ, or `global_head_dim` and
    `num_global_key_value_heads` those of layers that see everything."""
    heads, wide = config.integer("num_attention_heads", high=1 << 12), config.integer("intermediate_size", high=1 << 24)
    kv_heads, head_dim = config.integer("num_key_value_heads", high=1 << 12), config.integer("head_dim", high=1 << 12)
    twice, as_values = config.flag("use_double_wide_mlp", False), config.flag("attention_k_eq_v", False)
    full = {"head_dim": config.integer("global_head_dim", 512), "num_key_value_heads": kv_heads}
    if as_values:
        full["num_key_value_heads"] = config.integer("num_global_key_value_heads", kv_heads)
    sources, found = shared_layers(config, layers) or tuple(range(layers)), []
    for layer, kind in enumerate(layer_kinds(config, layers)):
        usual = {} if kind != FULL or config.has("per_layer_config") else full
        own = HfConfig(usual, config.where)
        if config.has("per_layer_config"):
            own = config.child("per_layer_config").child(str(layer))
        kv, dim = (own.integer("num_key_value_heads", kv_heads, high=1 << 12),
                   own.integer("head_dim", head_dim, high=1 << 12))  # fmt: skip
        if heads % kv:
            raise own.fail("num_key_value_heads", f"is {kv} in layer {layer}, must divide num_attention_heads {heads}")
        width = wide * (2 if twice and sources[layer] != layer else 1)
        found.append(LayerSizes(heads, kv, dim, width, keys_as_values=as_values and kind == FULL))
    return tuple(found)


def gemma4_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """`rope_parameters` of each kind of layers, of heads of their size."""
    longest = config.integer("max_position_embeddings", high=1 << 27)
    pairs = zip(gemma4_sizes(config, layers), layer_kinds(config, layers), strict=True)
    return tuple(read_rope(config, size.head_dim, longest, kind) for size, kind in pairs)


def per_layer_inputs(config: HfConfig, layers: int) -> LayerInputs:
    """Sizes of per-layer embeddings."""
    vocab_size = config.integer("vocab_size", high=1 << 24)
    width = config.integer("hidden_size_per_layer_input", 256, low=0)
    return LayerInputs(width, config.integer("vocab_size_per_layer_input", vocab_size, high=1 << 24) if width else 0)


def gemma4_experts(config: HfConfig, layers: int) -> MoE:
    """Experts beside the MLP of every layer, or none."""
    if not config.flag("enable_moe_block", False):
        return NO_EXPERTS
    experts = config.integer("num_experts", high=1024)
    routing = Routing(experts, config.integer("top_k_experts", high=experts), renormalize=True)
    return MoE(routing, config.integer("moe_intermediate_size", high=1 << 24), (True,) * layers, beside=True)


def gemma4_windows(config: HfConfig, layers: int) -> tuple[int, ...]:
    """Windows; `ModelError` for encoders, whose tokens see those behind them, and for a last layer that does not see
    everything: transformers takes it for one that does."""
    if layer_kinds(config, layers)[-1] != FULL:
        raise config.fail("layer_types", f"the last layer must be {FULL}, which the family's code makes of it")
    if config.text("use_bidirectional_attention", "") == "all":
        raise config.fail("use_bidirectional_attention", "'all' is not supported: a decoder's tokens see those before")
    return sliding_windows(config, layers)


GEMMA4 = GEMMA | {"stream_scale": "layer_scalar"}
BESIDE = {
    "router": "router.proj",
    "router_scale": "router.scale",
    "expert_scale": "router.per_expert_scale",
    "expert_gate": "experts.{}.gate_proj",
    "expert_up": "experts.{}.up_proj",
    "expert_down": "experts.{}.down_proj",
    "expert_norm": "pre_feedforward_layernorm_2",
    "dense_post_norm": "post_feedforward_layernorm_1",
    "expert_post_norm": "post_feedforward_layernorm_2",
}
REWRITES = (
    *naked((r"layers\.\d+",), ("layer_scalar",)),
    *naked(("router",), ("scale", "per_expert_scale")),
    *(replace(one, pattern=one.pattern.replace(r"\.mlp", r"\.layers\.\d+"), release=rf"\1.{name}")
      for one, name in zip(STACKED, ("gate_up_proj", "down_proj"), strict=True)),
)  # fmt: skip
"""Experts are stacked in the release, and no part of the MLP."""
INPUTS = {
    "input_table": "model.embed_tokens_per_layer",
    "input_rows": "model.per_layer_model_projection",
    "input_rows_norm": "model.per_layer_projection_norm",
    "input_gate": "per_layer_input_gate",
    "input_project": "per_layer_projection",
    "input_norm": "post_per_layer_input_norm",
}
GEMMA4_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "layer_types": gemma4_kinds,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
UNIFIED = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
GEMMA4_READS = {
    "windows": gemma4_windows,
    "sizes": gemma4_sizes,
    "rope": gemma4_rope,
    "inputs": per_layer_inputs,
    "moe": gemma4_experts,
    "embed_scale": embed_scale,
    "output_softcap": lambda config, layers: config.number("final_logit_softcapping", 0.0),
}


def gemma4(config: HfConfig) -> Family:
    """Family of Gemma 4's decoder; small ones have per-layer embeddings."""
    experts = config.flag("enable_moe_block", False)
    inputs = INPUTS if config.integer("hidden_size_per_layer_input", 256, low=0) else {}
    return Family(
        GEMMA4 | inputs | (BESIDE if experts else {}),
        GEMMA4_DEFAULTS,
        GEMMA4_READS,
        (*POST_NORMS, "q_norm", "k_norm", "stream_scale", *inputs, *(BESIDE if experts else {})),
        BIAS_FLAGS,
        {"join": "ended", "attention_scale": 1.0, "normed_values": True},
        (("hidden_act", "hidden_activation"),),
        rewrites=REWRITES,
    )


def gemma4_unified(config: HfConfig) -> Family:
    """Gemma 4 without experts and per-layer embeddings, whose images and audio have no towers: its decoder."""
    family = gemma4(HfConfig({**config.raw, **UNIFIED}, config.where))
    return replace(family, defaults={**family.defaults, "sliding_window": 1024, **UNIFIED})
