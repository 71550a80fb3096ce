"""A layer in a model's own files that predicts the token after the next (multi-token prediction, MTP).

DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 2.2. The row of position p joins the embedding of token p + 1
with what the model's head reads of position p, both normed; one ordinary layer follows, a norm of its own, and the
model's head. Files of models keep it under names that are none of the model's own layers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.model.families.delta_sizes import DeltaSizes
from quire.model.families.row import Family
from quire.model.load.roles import DISK_ROLES
from quire.model.spec import ChannelSizes, ConvSizes, ModelSpec, ScanSizes

ROLES = ("mtp_join", "mtp_token_norm", "mtp_hidden_norm", "final_norm")
"""What such a layer has beside the roles of a layer."""


def mtp_beginning(family: Family, layers: int) -> str:
    """What the names of the layer begin with, of a model of `layers` layers; "" where the family has none."""
    names = family.mtp
    if names is None:
        return ""
    return names.beginning or family.names["layer"].format(layers)


def mtp_family(family: Family, layers: int) -> Family:
    """The layer as a row of its own, whose names are whole. Its table of tokens and its head are the model's."""
    names, start = family.mtp, mtp_beginning(family, layers)
    assert names is not None, "whoever asks has found its tensors"
    own = {role: name for role, name in family.names.items() if role in DISK_ROLES and DISK_ROLES[role].layer}
    own = dict(names.roles) or own
    parts = (names.join, names.token_norm, names.hidden_norm, names.final_norm)
    own |= {"layer": start + names.layer, **{role: start + part for role, part in zip(ROLES, parts, strict=True)}}
    skipped = tuple(start + copy for copy in names.copies)
    return replace(family, names=own, required=(*family.required, *ROLES), skipped=skipped, rewrites=())


def mtp_spec(spec: ModelSpec, family: Family, tensors: Collection[str]) -> ModelSpec:
    """The shape of the layer, of `family`: that of a layer of `spec` which attends, with a window or without where the
    family says so. It has experts where `tensors` has a router for it."""
    windowed = None if family.mtp is None else family.mtp.windowed
    alike = (i for i in range(spec.layers) if spec.attends(i) and windowed in (None, spec.windows[i] > 0))
    like = max(alike, default=spec.layers - 1)
    router = f"{family.names['layer']}{family.names.get('router', '')}."
    mla = spec.at(like).mla
    indexer = replace(mla.indexer, own=mla.indexer.own[:1])
    sparse = "router" in family.names and any(name.startswith(router) for name in tensors)
    return replace(
        spec,
        layers=1,
        join="sequential" if spec.join == "single" else spec.join,
        rope=(spec.rope[like],),
        windows=(spec.windows[like],),
        mixers=(),
        sizes=spec.sizes[like : like + 1],
        kv_source=(),
        mla=replace(mla, indexer=indexer),
        bare=(),
        moe=replace(spec.moe, sparse=(sparse,) if spec.moe.sparse else ()),
        conv=ConvSizes(),
        delta=DeltaSizes(),
        scan=ScanSizes(),
        channels=ChannelSizes(),
    )


def keeping_all(spec: ModelSpec) -> ModelSpec:
    """The shape of the layer for its cache, which keeps all of a sequence even where the layer has a window: it reads
    rows later than the model does, whose window may have left them by then."""
    return replace(spec, windows=(0,) * spec.layers)
