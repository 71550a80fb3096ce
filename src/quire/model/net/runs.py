"""Sums over columns that are made in runs and added as a balanced tree: in one order, whoever has which run."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.net.parts import Mlp, Product
from quire.ops.arrays import Array
from quire.ops.backend import Ops


def tree_sum(ops: Ops, parts: list[Array]) -> Array:
    """Neighbours are added, then neighbours of these sums: parts, a power of two of them, are given up."""
    while len(parts) > 1:
        parts = [ops.add(left, right) for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@dataclass(frozen=True)
class RunsMlp:
    """An MLP, or experts, each of whose `parts` has a run of the hidden layer's columns."""

    parts: tuple[Mlp, ...]

    def __call__(self, ops: Ops, h: Array) -> Array:
        """h [T, hidden] -> [T, hidden]."""
        return tree_sum(ops, [part(ops, h) for part in self.parts])


@dataclass(frozen=True)
class RunsProduct:
    """A matrix each of whose `parts` has a run of `width` columns."""

    parts: tuple[Product, ...]
    width: int

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, parts * width] -> [T, n]."""
        columns = [ops.take_columns(x, i * self.width, self.width) for i in range(len(self.parts))]
        return tree_sum(ops, [part(ops, run) for part, run in zip(self.parts, columns, strict=True)])
