"""What a checkpoint says of single layers, for those that stay: its facts, fields of config.json, tables of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from quire.compress.prune.prunable import PrunableCheckpoint
from quire.model.families.row import layer_kinds
from quire.model.spec import ModelSpec
from quire.ops.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
PER_LAYER_FIELDS = ("layer_types", "layers_block_type", "no_rope_layers", "mlp_layer_types", "attention_layers",
                    "layer_rope_theta", "num_attention_heads_per_layer", "swiglu_limits", "swiglu_limits_shared",
                    "indexer_types")  # fmt: skip
"""Fields of config.json that are lists of one entry per layer."""
KINDS = frozenset({"layer_types", "layers_block_type", "attn_layer_indices"})
"""Fields that say what each layer is."""
BY_NUMBER = "per_layer_config"
"""Field with an object of the layers that differ from others, by their numbers."""


def kept_spec(model: PrunableCheckpoint, kept: list[int]) -> ModelSpec:
    """The facts of the layers `kept`; `ModelError` where one reads keys and values, or the choice, of a layer that
    goes, and for models of several streams."""
    spec, new_number = model.spec, {old: new for new, old in enumerate(kept)}
    if spec.streams.count:
        raise model.refuse("layers that mix several streams cannot be dropped: none leaves all of them as they are")
    moe = replace(
        spec.moe,
        sparse=_of(spec.moe.sparse, kept),
        clamps=_of(spec.moe.clamps, kept),
        mlp_clamps=_of(spec.moe.mlp_clamps, kept),
    )
    indexer = spec.mla.indexer
    unchosen = [i for i in kept if indexer.source(i) not in new_number]
    if unchosen:
        chooser = indexer.source(unchosen[0])
        raise model.refuse(f"layer {unchosen[0]} reads tokens that the indexer of layer {chooser} chose; keep both")
    lost = [i for i in kept if spec.kv_layer(i) not in new_number]
    if lost:
        raise model.refuse(f"layer {lost[0]} reads keys and values of layer {spec.kv_layer(lost[0])}; keep both")
    sources = tuple(new_number[spec.kv_layer(i)] for i in kept)
    return replace(
        spec,
        layers=len(kept),
        rope=_of(spec.rope, kept),
        windows=_of(spec.windows, kept),
        mixers=_of(spec.mixers, kept),
        decay_rates=_of(spec.decay_rates, kept),
        unit_norms=_of(spec.unit_norms, kept),
        mla=replace(spec.mla, indexer=replace(indexer, own=_of(indexer.own, kept))),
        blocks=replace(spec.blocks, own=_of(spec.blocks.own, kept)),
        query_scale=spec.query_scale.of(kept),
        bare=tuple((role, kept.index(i)) for role, i in spec.bare if i in kept),
        sizes=_of(spec.sizes, kept),
        kv_source=sources if sources != tuple(range(len(kept))) else (),
        moe=moe,
    )


def _of(facts: tuple[T, ...], kept: list[int]) -> tuple[T, ...]:
    """Return the facts by layer of the layers `kept`; none where there are none."""
    return tuple(facts[i] for i in kept) if facts else ()


def kept_fields(model: PrunableCheckpoint, kept: list[int]) -> dict[str, Any]:
    """The fields of config.json that say what single layers are, less the layers that go."""
    fields = _lists(model, kept) | _sparse_fields(model, kept) | renumbered(model.raw, kept)
    if model.spec.kv_source:
        fields["num_kv_shared_layers"] = sum(model.spec.kv_layer(i) != i for i in kept)
    return fields


def renumbered(config: Mapping[str, Any], kept: list[int]) -> dict[str, Any]:
    """The field of config.json whose keys are numbers of layers, by the new numbers; empty where there is none."""
    given = config.get(BY_NUMBER)
    if not isinstance(given, Mapping):
        return {}
    return {BY_NUMBER: {str(new): given[str(old)] for new, old in enumerate(kept) if str(old) in given}}


def kept_tables(model: PrunableCheckpoint, kept: list[int]) -> dict[str, Tensor]:
    """Tensors of all layers together, by their names, less the parts of the layers that go: per-layer embeddings."""
    made, width = dict[str, "Tensor"](), model.spec.inputs.width
    for role, axis in (("input_table", 1), ("input_rows", 0)):
        name = model.name(role, None)
        if width and name:
            index = torch.tensor([layer * width + i for layer in kept for i in range(width)])
            made[name] = model.tensors[name].index_select(axis, index)
    return made


def _lists(model: PrunableCheckpoint, kept: list[int]) -> dict[str, Any]:
    """The lists by layer less the entries that go; kinds of attention are written out where they follow a period."""
    spec, lists = model.spec, dict[str, Any]()
    for name in PER_LAYER_FIELDS:
        value = model.raw.get(name)
        if isinstance(value, list) and len(value) == spec.layers:
            lists[name] = [value[i] for i in kept]
    if "attn_layer_indices" in model.raw:
        lists["attn_layer_indices"] = [new for new, old in enumerate(kept) if spec.attends(old)]
    said = KINDS.intersection(lists) or "attention_types" in model.raw
    if not said and len(set(spec.windows)) > 1:
        kinds = layer_kinds(model.config, spec.layers)
        lists["layer_types"] = [kinds[i] for i in kept]
    if "attention_types" in model.raw:
        lists["attention_types"] = [[["local" if spec.windows[i] else "global" for i in kept], 1]]
    return lists


def _sparse_fields(model: PrunableCheckpoint, kept: list[int]) -> dict[str, Any]:
    """The fields that say which layers have experts, for the layers that stay."""
    plain = [new for new, old in enumerate(kept) if not model.spec.is_sparse(old)]
    sparse = [new for new, old in enumerate(kept) if model.spec.is_sparse(old)]
    if sparse and "moe_layer_interval" in model.raw:
        return {"moe_layer_interval": 1, "moe_layer_start_index": sparse[0], "moe_layer_end_index": sparse[-1]}
    if model.config.has("moe_layers") or model.config.has("interleave_moe_layer_step"):
        return {"moe_layers": sparse}
    if model.config.has("first_k_dense_replace"):
        return {"first_k_dense_replace": len(plain)}
    if model.raw.get("decoder_sparse_step") is not None:
        return {"decoder_sparse_step": 1, "mlp_only_layers": plain}
    return {}
