"""A vision part from what the checkpoint holds, packed and on its device; its matrices are never quantized at load."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from quire.core.dtypes import Dtype
from quire.model.disk.headers import VisionHeaders
from quire.model.load.parts import load_mlp, load_norm
from quire.model.load.reader import MatrixForm, WeightReader
from quire.model.load.roles import Share
from quire.model.net.parts import Mlp, Norm, PlainMlp
from quire.model.vision.tower import Projector, QuickGeluMlp, Tower, TowerLayer
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
        token = reader.place(reader.vector("class_token"))
        positions = to_numpy(as_f32(reader.table("positions"))) if reader.opened.claim.get("positions") else None
        embed_norm = reader.place(load_norm(reader, "embed_norm"))
    for i in range(spec.layers):
        with reader.part(i):
            layers.append(reader.place(load_tower_layer(reader, i)))
    final_norm = reader.place(load_norm(reader, "final_norm"))
    return Tower(
        ops=reader.ops,
        spec=spec,
        patch=patch,
        class_token=token,
        positions=positions,
        embed_norm=embed_norm,
        layers=tuple(layers),
        final_norm=final_norm,
        dtype=reader.form.dtype,
    )


def load_tower_layer(reader: WeightReader, index: int) -> TowerLayer:
    """Layer `index` of the tower."""
    q_norm, k_norm = reader.vector("q_row_norm", index), reader.vector("k_row_norm", index)
    return TowerLayer(
        attn_norm=load_norm(reader, "attn_norm", index),
        qkv=reader.linear(("q", "k", "v"), index),
        qk_norms=() if q_norm is None or k_norm is None else (q_norm, k_norm),
        o=reader.linear(("o",), index),
        attn_scale=reader.vector("attn_scale", index),
        mlp_norm=load_norm(reader, "mlp_norm", index),
        mlp=_sloped(load_mlp(reader, index)),
        mlp_scale=reader.vector("mlp_scale", index),
        windowed=reader.opened.spec.windows[index] > 0,
    )


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
    """One matrix, or two with an activation between."""
    down = reader.linear((f"{stack}_down",), layer)
    if not reader.opened.claim.get(f"{stack}_up", layer):
        return down
    return _sloped(PlainMlp(reader.linear((f"{stack}_up",), layer), down, reader.opened.spec.activation))


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
