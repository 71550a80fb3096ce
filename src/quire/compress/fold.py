"""Factors of a matrix's input columns, taken out of what makes them: for methods that move them into the matrix.

Of a norm its weight and bias are divided, of a matrix its rows: what the layer computes stays the same. A producer that
others read too, or that is followed by what does not pass a factor on, has none taken out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.compress.matrices import LinearWeight
from quire.compress.net import Net
from quire.compress.quantize.folding import unscale_norm, unscale_rows
from quire.compress.roles import get_role_matrix, set_role_matrix
from quire.model.mixers.table import mixer_of

NORMS = {"q": "attn_norm", "gate": "mlp_norm"}
"""The role that is observed -> the norm whose output it is."""
SEPARATE_NORM_JOINS = ("sequential", "post_norm", "parallel_two_norms")
"""Joins in which a norm is read by attention alone, and another by the MLP alone."""


def find_producer(net: Net, layer: int, observed: str, found: Sequence[LinearWeight]) -> str:
    """The role that makes the inputs of matrices that read what `observed` does, where factors may be taken out of it.

    "" where they may not. `found`: the matrices of the layer that are changed, to which a producing matrix must belong.
    """
    spec, claim = net.spec, net.opened.claim
    changed = {m.holder for m in found if m.place.expert is None}
    norm = NORMS.get(observed, "")
    if norm:
        alone = spec.join in SEPARATE_NORM_JOINS and not (norm == "mlp_norm" and spec.is_sparse(layer))
        return norm if alone and claim.get(norm, layer) else ""
    if observed == "o":
        plain = (
            spec.heads == spec.kv_heads
            and spec.value_dim == spec.head_dim
            and not spec.clip_qkv
            and mixer_of(spec, layer).own_heads
        )
        return "v" if plain and claim.holder("v", layer) in changed else ""
    gated = bool(claim.get(claim.holder("gate", layer), layer))
    return "up" if observed == "down" and gated and claim.holder("up", layer) in changed else ""


def unscale_producer(net: Net, layer: int, role: str, factors: Tensor) -> dict[str, Tensor]:
    """Divide the outputs of `role` by `factors` [k] in `net`; returns the vectors that changed, by name on disk."""
    claim, changed = net.opened.claim, dict[str, Tensor]()
    if role not in NORMS.values():
        set_role_matrix(net, role, layer, None, unscale_rows(get_role_matrix(net, role, layer), factors))
        holder = claim.holder(role, layer)
        name, rows = claim.get(holder, layer).get("bias"), net.reader().disk_rows(role, holder, layer)
        if name is not None:
            bias = net.tensors.writable(name)
            at = slice(None) if rows is None else rows
            bias[at] = unscale_rows(bias[at], factors)
            changed[name] = bias
        return changed
    offset = 1.0 if net.spec.norm.endswith("1p") else 0.0
    for part, name in claim.get(role, layer).items():
        shift = offset if part == "weight" else 0.0
        with torch.no_grad():
            changed[name] = unscale_norm(net.tensors[name] + shift, factors) - shift
        net.set(name, changed[name])
    return changed
