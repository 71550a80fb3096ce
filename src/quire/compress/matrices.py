"""The matrices of a layer as they lie in files: what methods that change weights one by one are given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from quire.compress.net import Net
from quire.core.errors import ConfigError, ModelError
from quire.model.disk.claim import RolePlace
from quire.model.load.roles import DISK_ROLES, FUSED
from quire.ops.arrays import to_torch

SAME_INPUT = {part: parts[0] for parts in FUSED.values() for part in parts}
"""Roles that read the same rows -> the first of them, which is observed."""
ORDER = ("qkv", "q_a", "kv_a", "q_b", "o", "gate_up", "expert_gate", "expert_down")
"""In which a layer computes: a matrix sees what those before it make."""


@dataclass(frozen=True)
class Matrix:
    """A matrix [n, k] of products in a layer. `holder`: its role, or the fused one that is on disk.

    `name`: of its weight as everything here names it, `base.weight`; in the file it may lie in a stack of experts.
    """

    holder: str
    place: RolePlace
    name: str

    @property
    def base(self) -> str:
        """What its tensors' names begin with."""
        return self.name.removesuffix(".weight")

    @property
    def observed(self) -> str:
        """The role whose input rows are those of this matrix."""
        first = FUSED.get(self.holder, (self.holder,))[0]
        return SAME_INPUT.get(first, first.replace("_up", "_gate") if first.endswith("_up") else first)

    @property
    def turn(self) -> int:
        """Its place in the order in which a layer computes."""
        names = (self.holder, self.observed)
        fused = next((name for name, parts in FUSED.items() if self.observed in parts), "")
        plain = {"shared_gate": "expert_gate", "shared_down": "expert_down", "down": "expert_down"}
        for i, name in enumerate(ORDER):
            if name in (*names, fused, plain.get(self.observed)):
                return i
        return 0

    @contextmanager
    def named(self) -> Iterator[None]:
        """An error of what is done here says that it is of this matrix."""
        try:
            yield
        except (ModelError, ConfigError) as error:
            raise type(error)(f"{self.base}: {error.message}") from None

    def of(self, net: Net) -> Tensor:
        """Its numbers now, f32 [n, k], rows as the file has them."""
        found = to_torch(net.opened.source.tensor(self.name)).float()
        return found.t() if self._turned(net) else found

    def columns(self, net: Net) -> int:
        """How many it has, without reading it."""
        return net.opened.source.infos[self.name].shape[0 if self._turned(net) else 1]

    def check(self, net: Net) -> None:
        """`ModelError` where a number is nan or inf, of which every method would make something else."""
        with self.named():
            if not all(math.isfinite(x) for x in torch.aminmax(to_torch(net.opened.source.tensor(self.name)).float())):
                raise ModelError("a weight holds nan or inf; use another checkpoint")

    def put(self, net: Net, value: Tensor) -> None:
        """Give it the numbers `value` [n, k]."""
        whole = net.tensors.own(net.rewritten.origins[self.name])
        part = net.rewritten.part(self.name, whole)
        with torch.no_grad():
            part.copy_(value.t() if self._turned(net) else value)

    def forget(self, net: Net) -> None:
        """Give it back the numbers of the file."""
        net.tensors.pop(net.rewritten.origins[self.name], None)

    def _turned(self, net: Net) -> bool:
        return net.opened.family.transposed and self.place.layer is not None


def matrices(net: Net, layer: int, ignore: tuple[str, ...] = ()) -> list[Matrix]:
    """Those of `layer` in the order in which it computes, without names that a glob of `ignore` matches."""
    found = [matrix for matrix in _all(net) if matrix.place.layer == layer]
    kept = [m for m in found if not any(fnmatchcase(m.base, glob) for glob in ignore)]
    return sorted(kept, key=lambda m: m.turn)


def _all(net: Net) -> Iterator[Matrix]:
    for (holder, place), parts in net.opened.claim.parts.items():
        role = DISK_ROLES[holder]
        if role.kind == "linear" and role.layer and not role.wide and not role.encoder and "weight" in parts:
            yield Matrix(holder, place, parts["weight"])
