"""The matrices of a `Net` by role, in the order of rows in which the model is served, and back to what lies on disk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.compress.net import Net
from quire.core.errors import ModelError
from quire.model.load.roles import DISK_ROLES, FUSED

RoleMatrix = tuple[str, int | None, int | None, Tensor]
"""(role, layer, expert, matrix [n, k])."""


def matrices_by_role(net: Net) -> Iterator[RoleMatrix]:
    """The matrices of all roles that a weight format may hold, one at a time: (role, layer, expert, [n, k] f32).

    Fused ones are cut, transposed ones turned, the rows of queries and keys in the order of half-split rope. A head
    that is the table of tokens is not among them, nor are tables, routers and norms.
    """
    reader = net.reader()
    for holder, place in net.opened.claim.parts:
        if DISK_ROLES[holder].kind == "linear":
            for role in FUSED.get(holder, (holder,)):
                yield role, place.layer, place.expert, reader.matrix((role,), place.layer, place.expert)[0].dequantize()
        net.tensors.source.give_back()


def get_role_matrix(net: Net, role: str, layer: int | None, expert: int | None = None) -> Tensor:
    """The matrix [n, k] f32 of one role, as `matrices_by_role` has it. `ModelError` when the model has none."""
    name, rows = _find_tensor(net, role, layer, expert)
    turned = _transposed_view(net, net.rewritten.part(name, net.tensors[net.rewritten.origins[name]]), layer)
    return (turned if rows is None else turned[rows]).float()


def set_role_matrix(net: Net, role: str, layer: int | None, expert: int | None, matrix: Tensor) -> None:
    """Write `matrix` [n, k], as `matrices_by_role` has it, to where it lies on disk: the inverse of claim, cut and rope's order.

    The tensor that holds it is copied the first time. `ModelError` when the model has no such role, or another shape.
    """
    name, rows = _find_tensor(net, role, layer, expert)
    with torch.no_grad():
        whole = net.tensors.writable(net.rewritten.origins[name])
        turned = _transposed_view(net, net.rewritten.part(name, whole), layer)
        shape = (len(turned) if rows is None else len(rows), turned.shape[1])
        if tuple(matrix.shape) != shape:
            is_not = f"is {list(shape)}, not {list(matrix.shape)}"
            raise ModelError(f"{role} of layer {layer} {is_not}; give one of its shape")
        turned[slice(None) if rows is None else rows] = matrix.to(whole.dtype)


def _find_tensor(net: Net, role: str, layer: int | None, expert: int | None) -> tuple[str, NDArray[np.int64] | None]:
    """The tensor that holds a role, and its rows there in our order."""
    claim = net.opened.claim
    holder = claim.holder(role, layer, expert)
    name = claim.get(holder, layer, expert).get("weight")
    if name is None:
        raise ModelError(
            f"{net.name} has no {role} of its own in layer {layer}, expert {expert}; see `matrices_by_role`"
        )
    return name, net.reader().disk_rows(role, holder, layer)


def _transposed_view(net: Net, matrix: Tensor, layer: int | None) -> Tensor:
    return matrix.t() if net.opened.family.transposed and layer is not None else matrix
