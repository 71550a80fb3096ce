"""The norms of a layer, and those outside of layers, from what the checkpoint holds."""

from __future__ import annotations

import numpy as np

from quire.core.dtypes import F32
from quire.model.load.place import Unplaced
from quire.model.load.reader import Reader
from quire.model.load.roles import DISK_ROLES
from quire.model.net.parts import LayerNorm, NoNorm, Norm, ProjectedNorm, ReplacingNorm, RmsNorm
from quire.ops.arrays import as_f32


def load_norm(reader: Reader, role: str, layer: int | None = None, scale: float = 1.0) -> Norm:
    """The norm `role`, its output multiplied by `scale`; x itself where the family has none."""
    spec = reader.opened.spec
    if spec.norm == "plain" and DISK_ROLES[role].optional is False:
        same: Unplaced = np.full(spec.hidden, scale, F32)
        return LayerNorm(same, None, spec.norm_eps)
    weight = reader.vector(role, layer)
    if weight is None:
        return NoNorm()
    if not spec.norm.startswith("layer"):
        return RmsNorm(weight * scale, spec.norm_eps)
    name = reader.opened.claim.get(role, layer).get("bias")
    bias: Unplaced = None if name is None else as_f32(reader.read(name)) * scale
    reader.count("norms", "f32", 0 if bias is None else bias.nbytes)
    return LayerNorm(weight * scale, bias, spec.norm_eps)


def load_block_norms(reader: Reader, index: int) -> tuple[Norm, Norm, Norm, Norm]:
    """The norms before and after attention, and before and after the MLP, of layer `index`.

    In a post-LN model the norm after an addition is read as the one before what follows, and takes the stream's
    place there.
    """
    if reader.opened.spec.join != "post_ln":
        before, after, mlp, after_mlp = (
            load_norm(reader, role, index) for role in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
        )
        return before, after, mlp, after_mlp
    before = ReplacingNorm(load_norm(reader, "mlp_post_norm", index - 1)) if index else NoNorm()
    return before, NoNorm(), ReplacingNorm(load_norm(reader, "attn_post_norm", index)), NoNorm()


def load_final_norm(reader: Reader) -> Norm:
    """The norm of the rows that want logits, and the projection to the head where there is one."""
    spec = reader.opened.spec
    if spec.join == "post_ln":
        norm = load_norm(reader, "mlp_post_norm", spec.layers - 1, scale=spec.logit_scale)
    else:
        norm = load_norm(reader, "final_norm", scale=spec.logit_scale)
    if not reader.opened.claim.get("project_out"):
        return norm
    return ProjectedNorm(norm, reader.linear(("project_out",), None))
