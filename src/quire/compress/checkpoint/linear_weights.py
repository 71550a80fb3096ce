"""Weight matrices of a `Net`, one by one as methods change them, and by role in the order in which they are served."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.compress.checkpoint.net import Net
from quire.core.errors import ConfigError, ModelError
from quire.model.disk.claim import RolePlace
from quire.model.load.roles import DISK_ROLES, FUSED
from quire.ops.arrays import to_torch

SHARED_INPUT = {part: parts[0] for parts in FUSED.values() for part in parts}
"""Roles that read the same rows -> the first of them, which is observed."""
COMPUTE_ORDER = (
    *("qkv", "q_a", "kv_a", "q_b", "conv_in", "o", "conv_out"),
    *("gate_up", "expert_gate", "expert_down"),
)
"""In which a layer computes: a matrix sees what those before it make."""


@dataclass(frozen=True)
class LinearWeight:
    """The weight [n, k] of a linear layer. `holder`: its role, or the fused role that is on disk.

    `name`: the name of the weight as the workbench knows it, `base.weight`; in the file it may lie in a stack of
    experts.
    """

    holder: str
    place: RolePlace
    name: str

    @property
    def base(self) -> str:
        """The name of the linear layer, with which the names of its tensors begin."""
        return self.name.removesuffix(".weight")

    @property
    def input_role(self) -> str:
        """The role whose input rows are those of this matrix; matrices that share an input share it."""
        first = FUSED.get(self.holder, (self.holder,))[0]
        return SHARED_INPUT.get(first, first.replace("_up", "_gate") if first.endswith("_up") else first)

    @property
    def position(self) -> int:
        """The place of the matrix in the order in which a layer computes."""
        names = (self.holder, self.input_role)
        fused = next((name for name, parts in FUSED.items() if self.input_role in parts), "")
        plain = {"shared_gate": "expert_gate", "shared_down": "expert_down", "down": "expert_down"}
        for i, name in enumerate(COMPUTE_ORDER):
            if name in (*names, fused, plain.get(self.input_role)):
                return i
        return 0

    @contextmanager
    def error_context(self) -> Iterator[None]:
        """Put the name of this matrix before the message of an error that is raised inside."""
        try:
            yield
        except (ModelError, ConfigError) as error:
            raise type(error)(f"{self.base}: {error.message}") from None

    def read(self, net: Net) -> Tensor:
        """Return the current numbers, f32 [n, k], rows as the file has them."""
        found = to_torch(net.opened.source.tensor(self.name)).float()
        return found.t() if self._is_transposed(net) else found

    def columns(self, net: Net) -> int:
        """Return the number of columns without reading the matrix."""
        return net.opened.source.infos[self.name].shape[0 if self._is_transposed(net) else 1]

    def check(self, net: Net) -> None:
        """Raise `ModelError` where a number is nan or inf, which no method can round or score."""
        with self.error_context():
            if not all(math.isfinite(x) for x in torch.aminmax(to_torch(net.opened.source.tensor(self.name)).float())):
                raise ModelError("a weight holds nan or inf; use another checkpoint")

    def assign(self, net: Net, value: Tensor) -> None:
        """Set the numbers of the matrix in `net` to `value` [n, k]."""
        whole = net.tensors.writable(net.rewritten.origins[self.name])
        part = net.rewritten.part(self.name, whole)
        with torch.no_grad():
            part.copy_(value.t() if self._is_transposed(net) else value)

    def restore(self, net: Net) -> None:
        """Drop assigned numbers, so that the matrix has those of the file again."""
        net.tensors.pop(net.rewritten.origins[self.name], None)

    def _is_transposed(self, net: Net) -> bool:
        return net.opened.family.transposed and self.place.layer is not None


def linear_weights(net: Net, layer: int, ignore: tuple[str, ...] = ()) -> list[LinearWeight]:
    """List the matrices of `layer` in the order in which it computes, without names that a glob of `ignore` matches."""
    found = [matrix for matrix in _all_linear_weights(net) if matrix.place.layer == layer]
    kept = [m for m in found if not any(fnmatchcase(m.base, glob) for glob in ignore)]
    return sorted(kept, key=lambda m: m.position)


def _all_linear_weights(net: Net) -> Iterator[LinearWeight]:
    for (holder, place), parts in net.opened.claim.parts.items():
        role = DISK_ROLES[holder]
        if role.kind == "linear" and role.layer and not role.wide and not role.encoder and "weight" in parts:
            yield LinearWeight(holder, place, parts["weight"])


RoleMatrix = tuple[str, int | None, int | None, Tensor]
"""(role, layer, expert, matrix [n, k])."""


def matrices_by_role(net: Net) -> Iterator[RoleMatrix]:
    """Yield the matrices of all roles that a weight format may hold, one at a time: (role, layer, expert, [n, k] f32).

    Fused ones are cut, transposed ones turned, the rows of queries and keys in the order of half-split rope. An output
    head that shares the embedding table is not among them, nor are embedding tables, routers and norms.
    """
    reader = net.reader()
    for holder, place in net.opened.claim.parts:
        if DISK_ROLES[holder].kind == "linear":
            for role in FUSED.get(holder, (holder,)):
                yield role, place.layer, place.expert, reader.matrix((role,), place.layer, place.expert)[0].dequantize()
        net.tensors.source.give_back()


def get_role_matrix(net: Net, role: str, layer: int | None, expert: int | None = None) -> Tensor:
    """Return the matrix [n, k] f32 of one role, as `matrices_by_role` has it. `ModelError` when the model has none."""
    name, rows = _find_tensor(net, role, layer, expert)
    turned = _transposed_view(net, net.rewritten.part(name, net.tensors[net.rewritten.origins[name]]), layer)
    return (turned if rows is None else turned[rows]).float()


def set_role_matrix(net: Net, role: str, layer: int | None, expert: int | None, matrix: Tensor) -> None:
    """Write `matrix` [n, k], as `matrices_by_role` has it, to where it lies on disk: the inverse of reading it by role.

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
