"""A vision part from what the checkpoint holds, packed and on its device; its matrices are never quantized at load."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.core.dtypes import F32, Dtype
from quire.model.disk.headers import VisionHeaders
from quire.model.load.parts import load_mlp, load_norm
from quire.model.load.placement import Unplaced
from quire.model.load.reader import MatrixForm, WeightReader
from quire.model.load.roles import Share
from quire.model.net.parts import GatedMlp, Mlp, Norm, PlainMlp, Product
from quire.model.tower_roles import BOUNDS
from quire.model.vision.tower import (
    Bounded,
    Projector,
    QuickGeluMlp,
    SideBySide,
    Standardized,
    ThreeMatrixMlp,
    Tower,
    TowerLayer,
)
from quire.model.vision.vision import Vision
from quire.ops.arrays import Array, as_f32, to_numpy
from quire.ops.backend import Ops


def load_vision(opened: VisionHeaders, ops: Ops, dtype: Dtype) -> Vision:
    """The vision part of a model, its matrices in `dtype`."""
    form = MatrixForm(dtype, narrow=False)
    below, above = (WeightReader(part, ops, form, Share(), None) for part in (opened.tower, opened.projector))
    tower = load_tower(below)
    projector, deep, newline = load_projectors(above, opened)
    size = sum(size for reader in (below, above) for _, size in reader.report.values())
    facts = repr((opened.tower.spec, opened.projector.spec, opened.reading, dtype.name))
    settings = hashlib.blake2b(facts.encode(), digest_size=16).digest()
    return Vision(tower, projector, deep, newline, opened.reading, size, settings, opened.file)


def load_tower(reader: WeightReader) -> Tower:
    """The tower, layer by layer."""
    spec, layers = reader.opened.spec, list[TowerLayer]()
    with reader.part():
        patch = reader.place(reader.linear(("patch",), None))
        patch_norms = reader.place((load_norm(reader, "patch_norm"), load_norm(reader, "patch_out_norm")))
        token = reader.place(reader.vector("class_token"))
        positions = to_numpy(as_f32(reader.table("positions"))) if reader.opened.claim.get("positions") else None
        if positions is not None and spec.patches.behind:
            positions = np.roll(positions, spec.patches.first, 0)
        embed_norm = reader.place(load_norm(reader, "embed_norm"))
    for i in range(spec.layers):
        with reader.part(i):
            layers.append(reader.place(load_tower_layer(reader, i)))
    final_norm = reader.place(load_final(reader))
    return Tower(
        ops=reader.ops,
        spec=spec,
        patch=patch,
        patch_norms=patch_norms,
        class_token=token,
        positions=positions,
        embed_norm=embed_norm,
        layers=tuple(layers),
        final_norm=final_norm,
        dtype=reader.form.dtype,
    )


def load_tower_layer(reader: WeightReader, index: int) -> TowerLayer:
    """Layer `index` of the tower."""
    spec = reader.opened.spec
    spans, span = load_spans(reader, index)
    bounded = bool(reader.opened.claim.get(f"q_{BOUNDS[0]}", index))
    return TowerLayer(
        attn_norm=load_norm(reader, "attn_norm", index),
        qkv=load_bounded(reader, "qkv", index) if bounded else reader.linear(("q", "k", "v"), index),
        spans=spans,
        span=span,
        o=load_bounded(reader, "o", index) if bounded else reader.linear(("o",), index),
        attn_scale=reader.vector("attn_scale", index),
        attn_post_norm=load_norm(reader, "attn_post_norm", index),
        mlp_norm=load_norm(reader, "mlp_norm", index),
        mlp=load_bounded_mlp(reader, index) if bounded else _sloped(load_mlp(reader, index)),
        mlp_scale=reader.vector("mlp_scale", index),
        mlp_post_norm=load_norm(reader, "mlp_post_norm", index),
        windowed=spec.windows[index] > 0,
    )


def load_spans(reader: WeightReader, index: int) -> tuple[tuple[Unplaced, ...], int]:
    """Weights of norms of queries and keys, of whole rows or of each head, and of values, which have none; and how many
    numbers are normed together."""
    spec = reader.opened.spec
    rows = reader.vector("q_row_norm", index), reader.vector("k_row_norm", index)
    if rows[0] is not None and rows[1] is not None:
        return (rows[0], rows[1]), spec.hidden
    heads = [weight for role in ("q_norm", "k_norm") if (weight := reader.vector(role, index)) is not None]
    if not heads:
        return (), 0
    heads += [np.ones(spec.head_dim, F32)] if spec.normed_values else []
    return tuple(np.tile(to_numpy(weight), spec.heads) for weight in heads), spec.head_dim


def load_bounded(reader: WeightReader, roles: Sequence[str], index: int) -> Product:
    """Matrices side by side, each between bounds of its own."""
    made = []
    for role in roles:
        low, high, least, most = (_number(reader, f"{role}_{bound}", index) for bound in BOUNDS)
        made.append(Bounded(reader.linear((role,), index), (low, high), (least, most)))
    return SideBySide(tuple(made)) if len(made) > 1 else made[0]


def load_bounded_mlp(reader: WeightReader, index: int) -> Mlp:
    """A gated MLP of such matrices."""
    gate_up, down = load_bounded(reader, ("gate", "up"), index), load_bounded(reader, ("down",), index)
    return GatedMlp(gate_up, down, reader.opened.spec.activation)


def _number(reader: WeightReader, role: str, index: int) -> float:
    found = reader.vector(role, index)
    assert found is not None, "the claim requires it"
    return float(to_numpy(found)[0])


def load_final(reader: WeightReader) -> Product:
    """The norm behind the last layer, or what rows are scaled by and standardized with in its place."""
    spec = reader.opened.spec
    if not spec.patches.scale:
        return load_norm(reader, "final_norm")
    shift, scale = reader.vector("std_bias"), reader.vector("std_scale")
    ones, none = np.ones(spec.hidden, F32), np.zeros(spec.hidden, F32)
    factor = ones if scale is None else to_numpy(scale)
    return Standardized(factor * np.float32(spec.patches.scale), none if shift is None else to_numpy(shift) * factor)


def _sloped(mlp: Mlp) -> Mlp:
    return QuickGeluMlp(mlp.up, mlp.down) if isinstance(mlp, PlainMlp) and mlp.activation == "quick_gelu" else mlp


def load_projectors(
    reader: WeightReader, opened: VisionHeaders
) -> tuple[Projector, tuple[Projector, ...], Array | None]:
    """The projector, those of further features, and the row behind each line of an image."""
    spec = reader.opened.spec
    with reader.part():
        joint = reader.linear(("connector_merge",), None) if reader.opened.claim.get("connector_merge") else None
        main = _projector(reader, opened, load_norm(reader, "connector_norm"), _matrices(reader, "connector", None))
        main = reader.place(replace(main, joint=joint))
        newline = reader.place(reader.vector("newline"))
    deep = []
    for i in range(spec.layers):
        with reader.part(i):
            made = _projector(reader, opened, load_norm(reader, "deep_norm", i), _matrices(reader, "deep", i))
            deep.append(reader.place(replace(made, norms_squares=True)))
    return main, tuple(deep), newline


def _matrices(reader: WeightReader, stack: str, layer: int | None) -> Mlp:
    """One matrix, or two or three with activations between."""
    down = reader.linear((f"{stack}_down",), layer)
    if not reader.opened.claim.get(f"{stack}_up", layer):
        return down
    up, activation = reader.linear((f"{stack}_up",), layer), reader.opened.spec.activation
    if layer is None and reader.opened.claim.get(f"{stack}_mid"):
        return ThreeMatrixMlp(PlainMlp(up, reader.linear((f"{stack}_mid",), None), activation), down)
    return _sloped(PlainMlp(up, down, activation))


def _projector(reader: WeightReader, opened: VisionHeaders, norm: Norm, project: Mlp) -> Projector:
    spec, square = reader.opened.spec, opened.tower.spec.patches.merge**2
    return Projector(
        ops=reader.ops,
        norm=norm,
        norms_squares=spec.connector.normed > spec.connector.width,
        square=square,
        pooled=opened.reading.pooled,
        joint=None,
        project=project,
        hidden=spec.hidden,
    )
