"""The layer that drafts (`families.mtp`) from the headers of a model's files: its tensors, claimed apart."""

from __future__ import annotations

from dataclasses import replace

from quire.core.errors import ModelError
from quire.model.disk.checkpoint import TensorSource
from quire.model.disk.claim import claim
from quire.model.disk.headers import ModelHeaders
from quire.model.disk.source_subset import SourceSubset
from quire.model.families.mtp import mtp_beginning, mtp_family, mtp_spec
from quire.model.families.row import Family
from quire.model.spec import ModelSpec

MOST_AHEAD = 8
"""Layers behind a model's last that are known as such."""


def part_mtp(source: TensorSource, spec: ModelSpec, family: Family) -> tuple[TensorSource, TensorSource | None]:
    """The tensors of the model, and those of the layer; None where the files have no such layer."""
    start = mtp_beginning(family, spec.layers)
    if family.mtp is None or not any(name.startswith(f"{start}{family.mtp.join}.") for name in source.infos):
        return source, None
    own = {name for name in source.infos if name.startswith(start)}
    return SourceSubset(source, source.infos.keys() - own), SourceSubset(source, own)


def left_out(source: TensorSource, spec: ModelSpec, family: Family) -> list[str]:
    """A note of layers for multi-token prediction in `source`, the model's tensors, which are skipped; none where there
    are none."""
    layer = family.names["layer"]
    ahead = tuple(layer.format(spec.file_layer(spec.layers - 1) + 1 + i) for i in range(MOST_AHEAD))
    own = tuple(start for start in family.skipped if "mtp" in start or start in ahead)
    count = sum(name.startswith(own) for name in source.infos) if own else 0
    if not count:
        return []
    why = f"those of {spec.family!r} do not draft" if family.mtp is None else "the first drafts"
    return [f"layers for multi-token prediction ({count} tensors) are left out: {why}"]


def with_mtp(opened: ModelHeaders, source: TensorSource | None) -> ModelHeaders:
    """`opened` with the layer that `source` has. A layer that cannot be read leaves the model as it is, with a note."""
    if source is None:
        return opened
    family = mtp_family(opened.family, opened.spec.layers)
    spec = mtp_spec(opened.spec, family, source.infos)
    required = family.required_parts(opened.config)
    try:
        claimed = claim(source.infos, spec, family, required, opened.scheme)
    except ModelError as error:
        note = f"the layer for multi-token prediction is not read: {error.message}"
        return replace(opened, notes=(*opened.notes, note))
    own = replace(opened, spec=spec, family=family, source=source, claim=claimed, notes=(), vision=None)
    return replace(opened, mtp=own)
