"""GGUF's architecture of latent attention whose layers with windows have other sizes than those without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import ModelError
from quire.model.disk.gguf_architecture import Architecture, TensorShapes
from quire.model.disk.gguf_latents import INDEXED
from quire.model.disk.gguf_names import KEY_LENGTHS, LATENT_LENGTHS, LOG_MULTIPLIER, NEXTN, VALUE_LENGTHS, WINDOW
from quire.model.disk.gguf_windowed import HEADS, LOCAL, OF_LAYERS
from quire.model.spec import ModelSpec

SIZES = {
    "local_row": KEY_LENGTHS[1],
    "local_latent": VALUE_LENGTHS[1],
    "local_key": f"{LATENT_LENGTHS[0]}_swa",
    "swa_v_head_dim": f"{LATENT_LENGTHS[1]}_swa",
    "swa_kv_lora_rank": "attention.kv_lora_rank_swa",
    "swa_rope_theta": WINDOW[2],
}
"""Sizes of latents in layers with a window, and of heads, and the base of their rope."""


def facts_of_dots3(raw: Mapping[str, Any], has: TensorShapes) -> dict[str, Any]:
    """Sizes of layers with a window, as releases call them. Those without have an indexer each."""
    layers = raw["num_hidden_layers"]
    windows = (raw.get("windows") or [False] * layers)[:layers]
    indexed = (raw.get("indexed") or [not window for window in windows])[:layers]
    if [not one for one in indexed] != [bool(window) for window in windows]:
        raise ModelError("attention.indexer.types: layers without a window, and no others, need an indexer")
    counts = raw.get(OF_LAYERS) or [raw[HEADS]] * layers
    heads = {bool(window): count for window, count in zip(windows, counts, strict=False)}
    if [heads[bool(window)] for window in windows] != list(counts[:layers]):
        raise ModelError("attention.head_count: layers of one kind need as many heads each")
    own = {HEADS: heads.get(False, counts[0]), "swa_num_attention_heads": heads.get(True, counts[0])}
    shared = raw.get("shared_expert_intermediate_size")
    own["shared_experts_intermediate_size"] = (
        shared // (raw.get("n_shared_experts") or 1) if shared else raw["moe_intermediate_size"]
    )
    own |= {"swa_q_lora_rank": raw["q_lora_rank"], "use_dsa": True}
    if raw.get("local_key"):
        own |= {"swa_head_dim": raw["local_key"], "swa_qk_nope_head_dim": raw["local_key"] - raw["qk_rope_head_dim"]}
    return own


def fields_of_dots3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Heads of each layer, sizes of those with a window, and which these are."""
    kinds, by_layer = raw["layer_types"], raw.get("per_layer_config") or {}
    windows = [kind == LOCAL for kind in kinds]
    local = {**raw, **(by_layer.get(str(windows.index(True)), {}) if any(windows) else {})}
    heads = [{**raw, **by_layer.get(str(i), {})}[HEADS] for i in range(len(kinds))]
    rank, turned = local["kv_lora_rank"], local["qk_rope_head_dim"]
    ropes = raw["rope_parameters"]
    return {
        HEADS: np.array(heads, np.int32),
        "windows": windows,
        "indexed": [kind == "indexed_attention" for kind in kinds],
        "local_row": rank + turned,
        "local_latent": rank,
        "local_key": local["qk_nope_head_dim"] + turned,
        "swa_v_head_dim": local["v_head_dim"],
        "swa_kv_lora_rank": rank,
        "swa_rope_theta": float((ropes.get(LOCAL) or next(iter(ropes.values())))["rope_theta"]),
    }


def factors_of_norms(spec: ModelSpec) -> dict[str, NDArray[np.float32]]:
    """What norms of files are multiplied by already, of a layer."""
    return {
        "q_a_norm": np.array([spec.mla.q_factor], np.float32),
        "kv_a_norm": np.array([spec.mla.factor], np.float32),
    }


def with_factors_in_norms(spec: ModelSpec) -> ModelSpec:
    """`spec` of files whose norms are multiplied."""
    sizes = tuple(
        replace(size, latents=replace(size.latents, q_factor=1.0, factor=1.0)) if size.latents else size
        for size in spec.sizes
    )
    return replace(spec, mla=replace(spec.mla, q_factor=1.0, factor=1.0), sizes=sizes)


LATENT_WINDOWS: dict[str, Architecture] = {
    "dots3note": replace(
        INDEXED,
        model_type="dots3_note_text",
        extra=(*LATENT_LENGTHS, LOG_MULTIPLIER, NEXTN, WINDOW[0]),
        names={**INDEXED.names, "turned_key_norm": "attn_k_norm"},
        facts={"apply_mla_qkv_lora_rescale": False},
        fields={**INDEXED.fields, **SIZES},
        lists={"windows": WINDOW[1], "indexed": "attention.indexer.types"},
        each={HEADS: OF_LAYERS},
        further=facts_of_dots3,
        tell=fields_of_dots3,
        factors=factors_of_norms,
        stored=with_factors_in_norms,
    ),
}
