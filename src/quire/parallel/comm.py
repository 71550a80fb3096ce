"""What ranks exchange while they compute."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.ops.backend import Ops


class Comm(Protocol):
    """One rank's side of a group. All ranks call the same collectives in the same order.

    A sum adds the parts in the order of ranks, so its bits depend on the degree alone.
    """

    rank: int
    world: int

    def all_reduce(self, ops: Ops, x: Tensor) -> Tensor:
        """x [T, d] f32 becomes the sum of all ranks' x, in place; returns x."""
        ...

    def leave(self) -> None:
        """A rank has ended: whoever waits for it need not."""
        ...

    def gather_columns(self, ops: Ops, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """All ranks' x [T, widths[rank]] f32 beside each other: [T, sum of widths]."""
        ...
