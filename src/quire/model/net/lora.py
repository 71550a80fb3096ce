"""What adapters do in the decoder. LoRA (Hu et al. 2021): y += B_i (A_i x) * scale for the rows of adapter i.

Every linear of a layer has room for `max_loras` adapters, ranks padded with zeros; a row names its adapter by a number
in an array that the step fills, so that recorded steps serve any mixture. Each row is computed from itself alone.
What else an adapter may hold is in the decoder only while one that holds it is in the step (`load/extensions.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.backend import Ops

NONE = -1
"""What a row without an adapter has in the place of a slot."""
Change = Callable[[Ops, Tensor, Tensor], Tensor]
"""x [T, k] and y [T, width], the output of a linear so far -> y changed, in place; each row by its own adapter."""


@dataclass(frozen=True)
class Piece:
    """Room for the adapters of one role: columns `start` .. `start` + n of its linear's output.

    a [slots, rank, k] f32; b [slots, rank, n] f32, the scale multiplied in; rows [tokens] int32: a row's slot, or -1.
    """

    a: Tensor
    b: Tensor
    rows: Tensor
    start: int

    def __call__(self, ops: Ops, x: Tensor, y: Tensor) -> Tensor:
        """y[:, start:start + n] += b (a x)."""
        return ops.lora(x, y, self.a, self.b, self.rows, self.start)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Factors:
    """DoRA: each output times a number of the row's adapter. excess [slots, 1, width] f32: factors less one."""

    excess: Tensor
    rows: Tensor

    def __call__(self, ops: Ops, x: Tensor, y: Tensor) -> Tensor:
        """y *= 1 + excess."""
        return ops.lora_scale(y, self.excess, self.rows)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Shift:
    """A bias of the row's adapter. shift [slots, 1, width] f32; ones [tokens, 1] f32."""

    shift: Tensor
    rows: Tensor
    ones: Tensor

    def __call__(self, ops: Ops, x: Tensor, y: Tensor) -> Tensor:
        """y += shift."""
        return ops.lora_expand(self.ones[: len(y)], y, self.shift, self.rows, 0)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Keep:
    """Leaves x in the first rows of `kept` [tokens, k], for who goes on with it after the step."""

    kept: Tensor

    def __call__(self, ops: Ops, x: Tensor, y: Tensor) -> Tensor:
        """y as it is."""
        ops.place_columns(self.kept, x, 0)
        return y


@dataclass(frozen=True)
class OwnRows:
    """One adapter's changes of embedded tokens, in the order: factors of columns, low-rank rows, rows of its own.

    excess [1, 1, d]; a [V, rank] and b [1, rank, d]; added [1 + m, d]: what is added to the rows of m tokens, after a
    row that changes nothing; place [V] int32: a token's row there; `first`: of `a`, as of `Embedding`. f32 (`added`:
    what the table has). The step's: mine [tokens] int32, 0 where a row has this adapter and -1 elsewhere; at [tokens]
    int32, its row of `added`.
    """

    slot: int
    mine: Tensor
    at: Tensor
    excess: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    added: Tensor | None = None
    place: Tensor | None = None
    first: int | None = None

    def look_up(self, tokens: Tensor, slots: Tensor) -> None:
        """Before a step: tokens [T] int32, and the rows' adapters [T] int32."""
        count, own = len(tokens), slots == self.slot
        self.mine[:count] = torch.where(own, 0, NONE)
        if self.place is not None:
            self.at[:count] = torch.where(own, self.place[tokens.long()], 0)

    def __call__(self, ops: Ops, x: Tensor, tokens: Tensor) -> Tensor:
        """x [T, d], rows of the model's table for tokens [T], in place."""
        if self.excess is not None:
            x = ops.lora_scale(x, self.excess, self.mine)
        if self.a is not None:
            x = ops.lora_expand(ops.embedding(tokens, self.a, self.first), x, self.b, self.mine, 0)
        if self.added is not None:
            x = ops.add_positions(x, self.at[: len(x)], self.added, 0)
        return x
