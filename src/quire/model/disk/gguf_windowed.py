"""GGUF's architectures of mixtures whose layers with windows have other heads, or another rope, than those without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.core.errors import ModelError
from quire.model.disk.gguf_architecture import Architecture, TensorShapes
from quire.model.disk.gguf_names import GATING, KV_HEADS, NEXTN, SIGMOID, WINDOW
from quire.model.families.names import GGUF_FINAL_NEXTN

FULL, LOCAL = "full_attention", "sliding_attention"
GROUPS = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}
HEADS = "num_attention_heads"
OF_LAYERS = "num_attention_heads_per_layer"
FACTORS = ("short_factor", "long_factor")
LOCAL_TURNED = "rope.dimension_count_swa"
"""Numbers of a head that turn in layers with a window."""


def ropes_of_kinds(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rope of layers that see everything, and of those with a window, which no context extension changes.

    The half keeps the product with the head size from being rounded down past the whole number.
    """
    ropes, part = raw.get("rope_parameters") or {}, raw.get("partial_rotary_factor") or 1.0
    whole = ropes.get(FULL) or {"rope_theta": raw["rope_theta"], **(raw.get("rope_scaling") or {})}
    local = {"rope_theta": raw.get("rope_local_base_freq") or raw["rope_theta"], "partial_rotary_factor": part}
    if (turned := raw.get("local_turned")) is not None:
        local["partial_rotary_factor"] = min(1.0, (turned + 0.5) / raw["head_dim"])
    return {
        "rope_scaling": None,
        "rope_parameters": {FULL: {"partial_rotary_factor": part, **whole}, LOCAL: local},
    }


def facts_of_laguna(raw: Mapping[str, Any], has: TensorShapes) -> dict[str, Any]:
    """Fields of both ropes, which layers have a window, and whether a gate is of a head or of each of its numbers, as
    its matrix has rows.

    llama.cpp's converter writes no list of layers: the first and every fourth behind it see everything then.
    """
    one = has.rows("blk.0.attn_gate.weight") == raw[HEADS]
    turns = raw.get("sliding_window_pattern") or 4 if raw.get("sliding_window") else 1
    kinds = raw.get("layer_types") or [LOCAL if i % turns else FULL for i in range(raw["num_hidden_layers"])]
    return ropes_of_kinds(raw) | {"gating": "per-head" if one else "per-element", "layer_types": kinds}


def fields_of_laguna(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Heads of each layer, and how much of one turns in layers with a window."""
    own = (raw.get("rope_scaling") or raw.get("rope_parameters") or {}).get(LOCAL) or {}
    part = own.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    heads = raw.get(OF_LAYERS) or [raw[HEADS]] * raw["num_hidden_layers"]
    return {HEADS: np.array(heads, np.int32), "local_turned": int(raw["head_dim"] * part)}


def facts_of_mimo2(raw: Mapping[str, Any], has: TensorShapes) -> dict[str, Any]:
    """Fields of both ropes, and of heads of keys and values, of which layers with a window have twice as many."""
    layers = raw["num_hidden_layers"]
    kinds, counts = raw.get("layer_types") or [FULL] * layers, raw.get("kv_heads_of_layers") or [raw[KV_HEADS]] * layers
    heads = next((count for count, kind in zip(counts, kinds, strict=False) if kind == FULL), counts[0] // 2)
    if counts[:layers] != [heads * (2 if kind == LOCAL else 1) for kind in kinds]:
        raise ModelError("attention.head_count_kv: layers with a window need twice the heads of the others")
    dense = next((i for i in range(layers) if has(f"blk.{i}.ffn_gate_inp.")), layers)
    return ropes_of_kinds(raw) | {KV_HEADS: heads, "layer_types": kinds, "num_dense_layers": dense}


def heads_of_mimo2(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Heads of keys and values of each layer."""
    counts = [raw[KV_HEADS] * (2 if kind == LOCAL else 1) for kind in raw["layer_types"]]
    return {KV_HEADS: np.array(counts, np.int32)}


CLAMPS = {"swiglu_limits": "swiglu_clamp_exp", "swiglu_limits_shared": "swiglu_clamp_shexp"}
"""Lists of what activations of experts, and of other MLPs, are limited to in each layer, 0 = not."""
LOCAL_HEADS = "num_sliding_attention_heads"


def facts_of_step35(raw: Mapping[str, Any], has: TensorShapes) -> dict[str, Any]:
    """Heads of both kinds of layers, of which those with a window turn wholly, the others by half.

    Factors of frequencies are as many as the pairs of a whole head.
    """
    layers = raw["num_hidden_layers"]
    kinds, counts = raw.get("layer_types") or [FULL] * layers, raw.get(OF_LAYERS) or [raw[HEADS]] * layers
    heads = dict(zip(kinds, counts, strict=False))
    if list(counts[:layers]) != [heads[kind] for kind in kinds]:
        raise ModelError("attention.head_count: layers of one kind need as many heads each")
    found = ropes_of_kinds({**raw, "partial_rotary_factor": 0.5, "local_turned": raw["head_dim"]})
    whole = found["rope_parameters"][FULL]
    whole |= {name: list(whole[name])[: raw["head_dim"] // 4] for name in FACTORS if name in whole}
    own = {HEADS: heads.get(FULL, counts[0]), LOCAL_HEADS: heads.get(LOCAL, counts[0])}
    mlps = ["sparse" if has(f"blk.{i}.ffn_gate_inp.") else "dense" for i in range(layers)]
    return found | own | {"layer_types": kinds, "mlp_layer_types": mlps}


def fields_of_step35(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Heads of each layer, and limits of activations."""
    heads = {FULL: raw[HEADS], LOCAL: raw.get(LOCAL_HEADS) or raw[HEADS]}
    limits = {name: np.array([limit or 0.0 for limit in raw[name]], np.float32) for name in CLAMPS if raw.get(name)}
    return limits | {HEADS: np.array([heads[kind] for kind in raw["layer_types"]], np.int32)}


WINDOWED: dict[str, Architecture] = {
    "step35": Architecture(
        "step3p5",
        extra=(*WINDOW, NEXTN, "moe_every_n_layers"),
        fixed={GATING: SIGMOID},
        turns=False,  # of what the key says layers without a window turn half
        required=("head",),
        each={HEADS: OF_LAYERS},
        lists=CLAMPS,
        further=facts_of_step35,
        tell=fields_of_step35,
    ),
    "laguna": Architecture(
        "laguna",
        extra=WINDOW,
        fixed={GATING: SIGMOID, "expert_weights_norm": True},
        fields={"local_turned": LOCAL_TURNED},
        spelling=(
            ("num_dense_layers", "first_k_dense_replace"),
            ("routed_scaling_factor", "moe_routed_scaling_factor"),
        ),
        each={HEADS: OF_LAYERS},
        further=facts_of_laguna,
        tell=fields_of_laguna,
    ),
    "mimo2": Architecture(
        "mimo_v2_flash",
        extra=(*WINDOW, NEXTN),
        mtp=GGUF_FINAL_NEXTN,
        fixed={GATING: SIGMOID},
        fields=GROUPS | {"v_head_dim": "attention.value_length", "attention_value_scale": "attention.value_scale"},
        spelling=(("num_experts", "n_routed_experts"), ("num_dense_layers", "first_k_dense_replace")),
        defaults={"attention_value_scale": 1.0},
        required=("head",),
        each={KV_HEADS: "kv_heads_of_layers"},
        further=facts_of_mimo2,
        tell=heads_of_mimo2,
    ),
}
