"""Step-3.5 and the decoder of Step-3.7 (StepFun 2026): a gate for each head, more heads in layers with windows, norms
whose weights are stored less 1, and activations that are limited in some layers.

Older files have lists by layer, which go on with the layers that predict further tokens.
"""

from __future__ import annotations

import math
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.gated_mixtures import kinds_turn
from quire.model.families.names import ALL_MLP_BIAS, BIAS_FLAGS, GATE_UP, LLAMA
from quire.model.families.readers import read_moe
from quire.model.families.row import Family, sliding_windows, spec_facts
from quire.model.layer_sizes import LayerSizes
from quire.model.spec import MoE
from quire.ops.experts import Clamp

NAMES = LLAMA | {
    "head_gate": "self_attn.g_proj",
    "router": "moe.gate",
    "router_bias": "moe.correction",
    "expert_gate": "moe.experts.{}.gate_proj",
    "expert_up": "moe.experts.{}.up_proj",
    "expert_down": "moe.experts.{}.down_proj",
    "shared_gate": "share_expert.gate_proj",
    "shared_up": "share_expert.up_proj",
    "shared_down": "share_expert.down_proj",
}
WRITTEN = (
    *(
        Rewrite(rf"(.*\.moe)\.{part}\.weight", rf"\1.experts.{{}}.{part}.weight", True, release=rf"\1.{part}.weight")
        for part in (*GATE_UP, "down_proj")
    ),
    Rewrite(r"(.*)\.mlp\.experts\.gate_up_proj", r"\1.moe.experts.{}.{}.weight", True, parts=GATE_UP),
    Rewrite(r"(.*)\.mlp\.experts\.down_proj", r"\1.moe.experts.{}.down_proj.weight", True),
    Rewrite(r"(.*)\.moe\.router_bias", r"\1.moe.correction.weight", release=r"\1.moe.router_bias"),
    Rewrite(r"(.*)\.mlp\.gate\.e_score_correction_bias", r"\1.moe.correction.weight"),
    Rewrite(r"(.*)\.mlp\.gate\.weight", r"\1.moe.gate.weight"),
    Rewrite(r"(.*)\.mlp\.shared_experts\.(.+)", r"\1.share_expert.\2"),
)
"""Experts stacked, in the release by matrices, in transformers' modules gate above up."""
BY_LAYER = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta",
            "partial_rotary_factors")  # fmt: skip


def fields_of_older(config: HfConfig) -> dict[str, Any]:
    """Fields as newer files have them: lists of as many entries as there are layers, a rope for each kind of layer."""
    layers = config.integer("num_hidden_layers", 45, high=1024)
    raw = {**config.raw}
    for name in BY_LAYER:
        if isinstance(raw.get(name), list):
            raw[name] = raw[name][:layers]
            if len(raw[name]) != layers:
                raise config.fail(name, f"has {len(raw[name])} entries for {layers} layers")
    kinds = raw.get("layer_types") or ["full_attention"] * layers
    if raw.get("mlp_layer_types") is None:
        raw["mlp_layer_types"] = _kinds_of_mlps(config, layers)
    other = config.child("attention_other_setting")
    for name, usual in (("head_dim", "head_dim"), ("num_attention_groups", "num_key_value_heads")):
        if other.has(name) and other.integer(name) != config.integer(name, config.integer(usual, other.integer(name))):
            raise other.fail(name, "is not that of the other layers, which is not supported")
    if raw.get("num_sliding_attention_heads") is None and other.has("num_attention_heads"):
        raw["num_sliding_attention_heads"] = other.integer("num_attention_heads", high=1 << 12)
    if not isinstance(raw.get("rope_parameters"), dict):
        raw["rope_parameters"] = _ropes_of_kinds(config, raw, kinds)
    return raw | {"rope_theta": None, "rope_scaling": None, "layer_types": kinds}


def _kinds_of_mlps(config: HfConfig, layers: int) -> list[str]:
    """`moe_layers_enum`, numbers of layers with experts in a list or a text; without it all from the fourth on."""
    told = config.raw.get("moe_layers_enum")
    numbers = told.split(",") if isinstance(told, str) else told
    if numbers is None:
        return ["sparse" if i >= 3 else "dense" for i in range(layers)]
    if not isinstance(numbers, list) or not all(str(number).strip().isdecimal() for number in numbers):
        raise config.fail("moe_layers_enum", f"is {told!r:.80}, needs numbers of layers")
    sparse = {int(number) for number in numbers}
    return ["sparse" if i in sparse else "dense" for i in range(layers)]


def _ropes_of_kinds(config: HfConfig, raw: dict[str, Any], kinds: list[str]) -> dict[str, Any]:
    """The rope of each kind of layer, one for all of them; what `rope_scaling` says is of layers that see
    everything."""
    found = dict[str, Any]()
    for i, kind in enumerate(kinds):
        thetas, shares = raw.get("rope_theta"), raw.get("partial_rotary_factors")
        theta = thetas[i] if isinstance(thetas, list) else thetas
        own = {"rope_type": "default", "rope_theta": theta if theta is not None else 1e4}
        own |= {"partial_rotary_factor": shares[i]} if isinstance(shares, list) else {}
        own |= config.child("rope_scaling").raw if kind == "full_attention" else {}
        first = found.setdefault(kind, own)
        for field, name in (("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
            if own.get(name) != first.get(name):
                reason = f"is {own.get(name)} in layer {i}, {first.get(name)} in others of {kind}: not supported"
                raise config.fail(field, reason)
    return found


def sizes(config: HfConfig, layers: int) -> tuple[LayerSizes, ...]:
    """Heads of each layer."""
    spec = spec_facts(config)
    windowed = config.integer("num_sliding_attention_heads", spec["heads"], high=1 << 12)
    if windowed % spec["kv_heads"]:
        raise config.fail("num_sliding_attention_heads", f"is {windowed}, not a multiple of {spec['kv_heads']}")
    heads = [windowed if window else spec["heads"] for window in sliding_windows(config, layers)]
    return tuple(LayerSizes(count, spec["kv_heads"], spec["head_dim"], spec["intermediate"]) for count in heads)


def clamp_of(limit: float) -> Clamp:
    """What limits act(gate) to at most `limit`, and up to it: act(gate) is the limit where gate is what is found
    here."""
    gate = limit
    for _ in range(64):  # gate * sigmoid(gate) = limit, by a fixed point that is nearer each time
        gate = limit * (1.0 + math.exp(-gate))
    return Clamp(1.0, limit, 0.0, gate)


def experts(config: HfConfig, layers: int) -> MoE:
    """Sigmoid scores, chosen with a correction bias; limits of experts and of other MLPs by layer, 0 = none."""

    def clamps(name: str) -> tuple[Clamp | None, ...]:
        limits = config.raw.get(name) or []
        if not isinstance(limits, list) or not all(limit is None or isinstance(limit, int | float) for limit in limits):
            raise config.fail(name, "needs a list of numbers")
        return tuple(clamp_of(limit) if limit else None for limit in limits)

    moe = read_moe("sigmoid", True)(config, layers)
    found, others = clamps("swiglu_limits"), clamps("swiglu_limits_shared")
    return MoE(moe.routing, moe.intermediate, moe.sparse, moe.shared, clamps=found, mlp_clamps=others)


SPELLING = (
    ("num_key_value_heads", "num_attention_groups"),
    ("num_experts", "moe_num_experts"),
    ("num_experts", "n_routed_experts"),
    ("num_experts_per_tok", "moe_top_k"),
    ("shared_expert_intermediate_size", "share_expert_dims"),
    ("shared_expert_intermediate_size", "share_expert_dim"),
    ("routed_scaling_factor", "moe_router_scaling_factor"),
)
STEP3P5 = Family(
    NAMES,
    {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 128000,
     "num_experts": 288, "num_experts_per_tok": 8, "moe_intermediate_size": 1280,
     "shared_expert_intermediate_size": 1280},
    {"windows": sliding_windows, "rope": kinds_turn, "sizes": sizes, "moe": experts,
     "attention_scale": lambda c, layers: c.number("query_pre_attn_scalar", c.integer("head_dim")) ** -0.5},
    ("q_norm", "k_norm", "head_gate", "router_bias"),
    BIAS_FLAGS | {"mlp_bias": ALL_MLP_BIAS},
    {"norm": "rms1p"},
    SPELLING,
    rewrites=WRITTEN,
    older=fields_of_older,
)  # fmt: skip
