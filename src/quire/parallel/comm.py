"""What ranks exchange while they compute. See docs/design/ranks.md."""

from __future__ import annotations

from typing import Protocol

from quire.ops.arrays import Array
from quire.ops.backend import Ops


class Comm(Protocol):
    """One rank's side of a group. All ranks call the same collectives in the same order.

    A sum adds the parts in the order of ranks, so its bits depend on the degree alone. Sums are of f32; what is only
    moved may be of any dtype whose rows are whole numbers of 4 bytes. Arrays are contiguous; any may have no rows.
    Everything raises `ValueError` once a rank has left.
    """

    rank: int
    world: int
    recordable: bool
    """Whether calls become part of a recorded step; else a step must run its Python."""

    @property
    def waited_s(self) -> float:
        """Seconds spent in `recv` until something was there."""
        ...

    def all_reduce(self, ops: Ops, x: Array) -> Array:
        """x [T, d] f32 becomes the sum of all ranks' x, in place; returns x."""
        ...

    def reduce_scatter(self, ops: Ops, x: Array, rows: tuple[int, ...]) -> Array:
        """Give this rank's `rows[rank]` rows of the sum of all ranks' x [sum of rows, d] f32: the bits of
        `all_reduce`."""
        ...

    def all_gather(self, ops: Ops, x: Array, rows: tuple[int, ...]) -> Array:
        """All ranks' x [rows[rank], d] one below the other: [sum of rows, d]."""
        ...

    def gather_columns(self, ops: Ops, x: Array, widths: tuple[int, ...]) -> Array:
        """All ranks' x [T, widths[rank]] f32 beside each other: [T, sum of widths]."""
        ...

    def all_to_all(self, ops: Ops, x: Array, sends: Array, most: int) -> tuple[Array, Array]:
        """x [T, d] by destination: `sends[0]` rows to rank 0, then `sends[1]` to rank 1, ... (not all of T, perhaps).

        sends [world] i32 is read when the call runs. Returns [most, d], the rows from rank 0, then from rank 1, ...,
        behind which nothing is written, and how many from each [world] i32. `most` is the same on all ranks;
        `ValueError` on all of them when one is sent more, or sends more than it has.
        """
        ...

    def broadcast(self, ops: Ops, x: Array, root: int) -> Array:
        """x, of the same shape on all ranks, becomes that of rank `root`, in place; returns x."""
        ...

    def send(self, ops: Ops, x: Array, to: int) -> None:
        """x to rank `to`, which receives what is sent to it in order. Goes on at once while there is room between."""
        ...

    def recv(self, ops: Ops, out: Array, source: int) -> Array:
        """The next array from rank `source`, which has `out`'s size, in `out`; returns it."""
        ...

    def leave(self) -> None:
        """A rank has ended: whoever waits for it, or will, need not."""
        ...
