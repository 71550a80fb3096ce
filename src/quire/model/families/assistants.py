"""Models that draft for another and have no keys and values of their own (Gemma 4's assistants).

Team Gemma 2026. Each layer has queries alone, which read keys and values of the last layer of its kind in the model
that is drafted for. What enters is joined of that model's embedding of a token and its hidden row before the token, and
what leaves goes back to that width. Logits may be those of tokens in likely clusters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.core.errors import ModelError
from quire.model.disk.hf_config import HfConfig
from quire.model.draft_sizes import OF_TARGET, AssistantSizes
from quire.model.families.gemma import gemma4, gemma4_unified
from quire.model.families.names import without
from quire.model.families.row import Family, facts_of
from quire.model.families.text_parts import text_part
from quire.model.spec import ModelSpec

ASSISTANTS: dict[str, tuple[Callable[[HfConfig], Family], int]] = {
    "gemma4_assistant": (gemma4, 1536),
    "gemma4_unified_assistant": (gemma4_unified, 3840),
}
"""By `model_type`: the row of the decoder, and numbers of a hidden row where the file does not say it."""
NAMES = {
    "assistant_in": "pre_projection",
    "assistant_out": "post_projection",
    "centroids": "masked_embedding.centroids",
}
ALONE = 'it drafts for another model: start that with --speculative-config \'{"method": "mtp", "model": FOLDER}\''
"""Why an assistant does not run."""
ORDER = "masked_embedding.token_ordering"
"""Tokens of each cluster, cluster by cluster, [V] integers."""
OWN = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
"""Fields of the decoder that are said in another way: all of its layers read another model's keys and values."""


def check_alone(raw: Mapping[str, Any], where: str) -> None:
    """`ModelError` for the config.json of an assistant, which runs beside another model alone."""
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in ASSISTANTS:
        raise ModelError(f"{where}: model_type: {kind!r} does not run alone: {ALONE}")


def read_assistant(raw: Mapping[str, Any], where: str) -> tuple[ModelSpec, Family, HfConfig]:
    """Spec, family and reader of the content of an assistant's config.json; `ModelError` where it is of none."""
    kind, part = raw.get("model_type"), text_part(raw)
    if not isinstance(kind, str) or kind not in ASSISTANTS or part is None:
        known = ", ".join(ASSISTANTS)
        raise ModelError(f"{where}: model_type {kind!r} is no model that drafts by the method mtp; known: {known}")
    row, width = ASSISTANTS[kind]
    inner = HfConfig({**part.config, **OWN}, f"{where}: {part.where}")
    sizes = _sizes(HfConfig(raw, where), width)
    family = _with_ends(row(inner), sizes)
    config = family.fill_in(inner)
    facts = facts_of(family, config)
    facts |= {"kv_source": (OF_TARGET,) * facts["layers"], "tied_head": bool(sizes.clusters), "assistant": sizes}
    spec = ModelSpec(family=str(kind), **facts)
    if sizes.clusters and spec.vocab_size % sizes.clusters:
        raise ModelError(f"{where}: num_centroids is {sizes.clusters}, must divide vocab_size {spec.vocab_size}")
    return spec, family, config


def _sizes(whole: HfConfig, width: int) -> AssistantSizes:
    width = whole.integer("backbone_hidden_size", width, high=1 << 20)
    if not whole.flag("use_ordered_embeddings", False):
        return AssistantSizes(width)
    clusters = whole.integer("num_centroids", 2048, high=1 << 24)
    return AssistantSizes(width, clusters, whole.integer("centroid_intermediate_top_k", 32, high=clusters))


def _with_ends(family: Family, sizes: AssistantSizes) -> Family:
    """`family` with what stands before and behind its layers. The table of tokens is multiplied with or, where only
    rows of some tokens are, looked up."""
    table = {"embed" if sizes.clusters else "head": family.names["embed"]}
    names = without(family.names, "embed", "head") | table | NAMES
    read = {field: how for field, how in family.read.items() if field not in ("embed_scale", "output_softcap")}
    required = (*family.required, *NAMES) if sizes.clusters else (*family.required, "assistant_in", "assistant_out")
    return replace(
        family,
        names=names,
        read=read,
        required=tuple(role for role in required if role != "k_norm"),
        buffers=(*family.buffers, ORDER.rpartition(".")[2]),
        skipped=(*family.skipped, "lm_head."),
    )
