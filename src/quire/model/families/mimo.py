"""MiMo-V2-Flash (Xiaomi 2026): layers of two kinds, whose values are shorter than their keys.

Layers with a window have twice the heads of keys and values, and sinks.
"""

from __future__ import annotations

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.gated_mixtures import GATED_MIXTURES, kinds_turn
from quire.model.families.mixtures import CORRECTED, EXPERTS, ROUTED, sigmoid_experts
from quire.model.families.names import CORRECTION, LLAMA, QKV_BIAS, STACKED, MtpNames, without
from quire.model.families.row import Family, layer_kinds, sliding_windows, spec_facts
from quire.model.families.step3p5 import STEP3P5
from quire.model.layer_sizes import LayerSizes
from quire.model.spec import Factors


def mimo_kinds(config: HfConfig) -> list[str]:
    """`layer_types` where config.json has none: the first layer sees everything, and every sixth."""
    layers = config.integer("num_hidden_layers", high=1024)
    return ["sliding_attention" if i and (i + 1) % 6 else "full_attention" for i in range(layers)]


def mimo_windows(config: HfConfig, layers: int) -> tuple[int, ...]:
    """Windows: `sliding_window` tokens, or `sliding_window_size` beside the row itself."""
    size = config.integer("sliding_window_size", config.integer("sliding_window") - 1) + 1
    return sliding_windows(HfConfig({**config.raw, "sliding_window": size}, config.where), layers)


def mimo_sizes(config: HfConfig, layers: int) -> tuple[LayerSizes, ...]:
    """Heads of each layer."""
    spec = spec_facts(config)
    heads, kv_heads = spec["heads"], spec["kv_heads"]
    if heads % (2 * kv_heads):
        raise config.fail("num_key_value_heads", f"is {kv_heads}; twice as many must divide {heads} heads")
    counts = [kv_heads * (2 if kind == "sliding_attention" else 1) for kind in layer_kinds(config, layers)]
    return tuple(LayerSizes(heads, count, spec["head_dim"], spec["intermediate"]) for count in counts)


def value_head(config: HfConfig, layers: int) -> int:
    """Numbers of a head's values, at least half of those of a key."""
    size, longest = config.integer("v_head_dim", high=1 << 12), config.integer("head_dim")
    if not longest <= 2 * size <= 2 * longest:
        raise config.fail("v_head_dim", f"is {size}; from half of head_dim {longest} to all of it is supported")
    return size if size < longest else 0


MTP = MtpNames(
    "model.mtp.layers.0.",
    *("", "eh_proj", "enorm", "hnorm", "final_layernorm"),
    roles={role: LLAMA[role] for role in ("attn_norm", "q", "k", "v", "o", "gate", "up", "down")}
    | {"mlp_norm": "pre_mlp_layernorm", "sinks": "self_attn.sinks"},
    windowed=True,
)
"""The first of three layers that follow each other; an MLP without experts."""
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
SINKS = Rewrite(
    r"(.*\.self_attn)\.(?:attention_sink_bias|sinks)", r"\1.sinks.weight", release=r"\1.attention_sink_bias"
)
MIMO_V2_FLASH = Family(
    without(LLAMA, "q_norm", "k_norm") | EXPERTS | CORRECTED | {"sinks": "self_attn.sinks"},
    {"head_dim": 192, "v_head_dim": 128, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
     "max_position_embeddings": 131072, "sliding_window": 129, "layer_types": mimo_kinds, "n_routed_experts": 256,
     "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 1,
     "attention_value_scale": 0.707, "partial_rotary_factor": 0.334, "rope_parameters": ROPES},
    {"windows": mimo_windows, "rope": kinds_turn, "sizes": mimo_sizes, "value_head": value_head,
     "factors": lambda config, layers: Factors(attention=config.number("attention_value_scale", 1.0)),
     "moe": sigmoid_experts(True)},
    ("sinks", "router_bias"),
    {"attention_bias": QKV_BIAS}, {"window_sinks": True}, ROUTED,
    skipped=("model.mtp.",), rewrites=(SINKS, CORRECTION, *STACKED), mtp=MTP,
)  # fmt: skip
GATED_AND_WINDOWED = GATED_MIXTURES | {"mimo_v2_flash": MIMO_V2_FLASH, "step3p5": STEP3P5}
