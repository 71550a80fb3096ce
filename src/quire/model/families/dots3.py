"""dots.note 3 (Dots Studio 2026): latent attention of two kinds, whose sizes differ.

Layers without a window read tokens that an indexer of their own chooses. Layers with one have other heads, larger
latents and a rope of another base. The part of a key that turns has a norm, and what heads find a gate for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.mixtures import sigmoid_experts
from quire.model.families.names import NEXTN, without
from quire.model.families.readers import read_mla
from quire.model.families.rope import Rope, read_rope
from quire.model.families.row import Family, Reader, layer_kinds, sliding_windows
from quire.model.families.sparse import INDEXER, indexed, read_indexed
from quire.model.layer_sizes import LayerSizes
from quire.model.spec import MLA, MoE
from quire.ops.indexer import NO_INDEXER

FULL, SLIDING, INDEXED = "full_attention", "sliding_attention", "indexed_attention"
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 524288,
    "q_lora_rank": 1024,
    "moe_intermediate_size": 1536,
    "shared_experts_intermediate_size": 1536,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 64,
}
WINDOWED = {
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
"""Sizes of layers with a window, which releases call `swa_` and these names."""


def kinds_of(config: HfConfig, layers: int) -> list[str]:
    """`layer_types`; in files without, the first two and every fourth see everything. Releases have a flag for layers
    that read chosen tokens."""
    windows = config.flag("use_sliding_window", True)
    usual = [SLIDING if windows and i > 1 and i % 4 != 1 else INDEXED for i in range(layers)]
    kinds = list(config.texts("layer_types")) or usual
    if config.has("per_layer_config") and not config.has("use_dsa"):
        return kinds
    chooses = config.flag("use_dsa", True)
    return [kind if kind == SLIDING else INDEXED if chooses else FULL for kind in kinds]


def experts_of(config: HfConfig, layers: int) -> list[str]:
    """`mlp_layer_types`, or by the fields of releases."""
    first, marks = config.integer("first_k_dense_replace", 1, low=0), config.raw.get("moe_layer_freq", 1)
    if isinstance(marks, list) and len(marks) < layers:
        raise config.fail("moe_layer_freq", f"names {len(marks)} layers, num_hidden_layers is {layers}")
    every = 1 if isinstance(marks, list) else config.integer("moe_layer_freq", 1)
    sparse = [bool(marks[i]) if isinstance(marks, list) else i % every == 0 for i in range(layers)]
    return list(config.texts("mlp_layer_types")) or [
        "sparse" if i >= first and sparse[i] else "dense" for i in range(layers)
    ]


def turning(config: HfConfig) -> dict[str, dict[str, Any]]:
    """The rope of both kinds of layers, without the share of a head that turns: all of its part does."""
    given = config.child("rope_parameters" if config.has("rope_parameters") else "rope_scaling").raw
    theta, short = config.number("rope_theta", 8e7), config.number("swa_rope_theta", 5e4)
    found = dict[str, dict[str, Any]]()
    for kind, name, base in ((FULL, INDEXED, theta), (FULL, FULL, theta), (SLIDING, SLIDING, short)):
        own = given.get(name) if any(isinstance(part, Mapping) for part in given.values()) else given
        if isinstance(own, Mapping):
            plain = {field: value for field, value in own.items() if field != "partial_rotary_factor"}
            found.setdefault(kind, {"rope_theta": theta if plain else base, **plain})
    return found


def as_newer_files(config: HfConfig) -> dict[str, Any]:
    """Fields of a release as transformers writes them; the part of a head that turns is taken for a head."""
    layers = config.integer("num_hidden_layers", high=1024)
    kinds = kinds_of(config, layers)
    own = {name: config.raw.get(f"swa_{name}", size) for name, size in WINDOWED.items()}
    own["qk_rope_head_dim"] = config.integer(
        "swa_qk_rope_head_dim",
        config.integer("swa_head_dim", WINDOWED["head_dim"])
        - config.integer("swa_qk_nope_head_dim", WINDOWED["qk_nope_head_dim"]),
    )
    made = {
        "layer_types": kinds,
        "mlp_layer_types": experts_of(config, layers),
        "rope_parameters": turning(config),
        "rope_scaling": None,
        "sliding_window": config.integer("sliding_window", config.integer("sliding_window_size", 512)),
        "head_dim": config.integer("qk_rope_head_dim", 64),
        "per_layer_config": {str(i): own for i, kind in enumerate(kinds) if kind == SLIDING},
    }
    if config.has("per_layer_config"):
        made["per_layer_config"] = {str(i): part for i, part in config.child("per_layer_config").raw.items()}
    if config.has("moe_shared_expert_intermediate_size"):
        made["shared_experts_intermediate_size"] = config.integer("moe_shared_expert_intermediate_size")
    return {**config.raw, **made}


def latents_of(config: HfConfig, layer: HfConfig, layers: int) -> MLA:
    """Sizes by what `layer` says and, where it says nothing, `config`; latents are as long as the stream."""
    own = HfConfig({**config.raw, **layer.raw}, layer.where)
    kind = read_indexed(True, False) if INDEXED in config.texts("layer_types") else read_mla
    mla, hidden = kind(own, layers), config.integer("hidden_size")
    if not mla.q_rank:
        raise own.fail("q_lora_rank", "is not there; queries of this family pass through a smaller space")
    rescaled = config.flag("apply_mla_qkv_lora_rescale", True)
    q_factor, factor = (math.sqrt(hidden / rank) if rescaled else 1.0 for rank in (mla.q_rank, mla.rank))
    return replace(mla, q_factor=q_factor, factor=factor, eps=config.number("rms_norm_eps"))


def model_latents(config: HfConfig, layers: int) -> MLA:
    """Sizes of layers that choose tokens, or of all that have no others."""
    return latents_of(config, HfConfig({}, config.where), layers)


def layer_sizes(config: HfConfig, layers: int) -> tuple[LayerSizes, ...]:
    """Heads and latents of each layer."""
    found, wide = list[LayerSizes](), config.integer("intermediate_size", high=1 << 24)
    whole = model_latents(config, layers)
    for i, kind in enumerate(config.texts("layer_types")):
        own = config.child("per_layer_config").child(str(i))
        mla = latents_of(config, own, layers)
        heads = own.integer("num_attention_heads", config.integer("num_attention_heads"), high=1 << 12)
        latents = mla if kind == INDEXED else replace(mla, indexer=NO_INDEXER)
        own_latents = None if latents == whole else latents
        found.append(LayerSizes(heads, heads, mla.nope + mla.rope, wide, latents=own_latents))
    return tuple(found)


def layer_ropes(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """The rope of each kind of layers."""
    longest = config.integer("max_position_embeddings", high=1 << 27)
    whole, found = model_latents(config, layers).rope, list[Rope]()
    for size, kind in zip(layer_sizes(config, layers), layer_kinds(config, layers), strict=True):
        found.append(read_rope(config, size.latents.rope if size.latents else whole, longest, kind))
    return tuple(found)


def experts(config: HfConfig, layers: int) -> MoE:
    """Experts by sigmoid scores; the shared ones are one of their widths together."""
    width = config.integer("shared_experts_intermediate_size", high=1 << 24)
    count = config.integer("n_shared_experts", high=1024)
    return replace(sigmoid_experts(True)(config, layers), shared=count * width)


def table_of_drafts(layers: int) -> Rewrite:
    """The layer that drafts has a table of tokens elsewhere than its other tensors."""
    return Rewrite(r"(.*)mtp\.embed_tokens\.weight", rf"\1layers.{layers}.embed_tokens.weight")


OWN = {"head_gate": "self_attn.g_proj", "turned_key_norm": "self_attn.k_rope_only_layernorm"}
READS: dict[str, Reader] = {
    "mla": model_latents,
    "windows": sliding_windows,
    "sizes": layer_sizes,
    "rope": layer_ropes,
    "moe": experts,
}
MTP = replace(NEXTN, windowed=True)


def dots3_note(config: HfConfig) -> Family:
    """DeepSeek-V3.2 with windows of other sizes, gates of heads and a norm of keys."""
    layers = config.integer("num_hidden_layers", high=1024)
    base = indexed(HfConfig({**config.raw, "moe_layer_freq": 1}, config.where), DEFAULTS, interleaved=True)
    unused = () if INDEXED in kinds_of(config, layers) else (*INDEXER, "index_k_norm.bias")
    return replace(
        base,
        names={**without(base.names, *unused), **OWN},
        read={**base.read, **READS},
        required=(*(part for part in base.required if part not in unused), *OWN),
        older=as_newer_files,
        rewrites=(table_of_drafts(layers), *base.rewrites),
        mtp=MTP,
    )
