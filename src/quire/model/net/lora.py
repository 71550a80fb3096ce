"""What adapters do in the decoder. LoRA (Hu et al. 2021): y += B_i (A_i x) * scale for the rows of adapter i.
See docs/design/adapters.md.

Every linear of a layer has room for `max_loras` adapters, ranks padded with zeros; a row names its adapter by a number
in an array that the step fills, so that recorded steps serve any mixture. Each row is computed from itself alone.
What else an adapter may hold is in the decoder only while one that holds it is in the step
(`load/adapter_extensions.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.ops.arrays import Array
from quire.ops.backend import Ops

NONE = -1
"""What a row without an adapter has in the place of a slot."""
Change = Callable[[Ops, Array, Array], Array]
"""x [T, k] and y [T, width], the output of a linear so far -> y changed, in place; each row by its own adapter."""


@dataclass(frozen=True)
class LoraSlots:
    """Room for the adapters of one role: columns `start` .. `start` + n of its linear's output.

    a [slots, rank, k] f32; b [slots, rank, n] f32, the scale multiplied in; rows [tokens] int32: a row's slot, or -1.
    """

    a: Array
    b: Array
    rows: Array
    start: int

    def __call__(self, ops: Ops, x: Array, y: Array) -> Array:
        """y[:, start:start + n] += b (a x)."""
        return ops.lora(x, y, self.a, self.b, self.rows, self.start)


@dataclass(frozen=True)
class Factors:
    """DoRA: each output times a number of the row's adapter. excess [slots, 1, width] f32: factors less one."""

    excess: Array
    rows: Array

    def __call__(self, ops: Ops, x: Array, y: Array) -> Array:
        """y *= 1 + excess."""
        return ops.lora_scale(y, self.excess, self.rows)


@dataclass(frozen=True)
class Shift:
    """A bias of the row's adapter. shift [slots, 1, width] f32; ones [tokens, 1] f32."""

    shift: Array
    rows: Array
    ones: Array

    def __call__(self, ops: Ops, x: Array, y: Array) -> Array:
        """y += shift."""
        return ops.lora_expand(self.ones[: len(y)], y, self.shift, self.rows, 0)


@dataclass(frozen=True)
class KeepRows:
    """Leaves x in the first rows of `kept` [tokens, k], for who goes on with it after the step."""

    kept: Array

    def __call__(self, ops: Ops, x: Array, y: Array) -> Array:
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
    mine: Array
    at: Array
    excess: Array | None = None
    a: Array | None = None
    b: Array | None = None
    added: Array | None = None
    place: Array | None = None
    first: int | None = None

    def look_up(self, tokens: Array, slots: Array) -> None:
        """Before a step: tokens [T] int32, and the rows' adapters [T] int32."""
        count, own = len(tokens), slots == self.slot
        self.mine[:count] = NONE
        self.mine[:count][own] = 0
        if self.place is not None:
            self.at[:count] = self.place[tokens] * own

    def __call__(self, ops: Ops, x: Array, tokens: Array) -> Array:
        """x [T, d], rows of the model's table for tokens [T], in place."""
        if self.excess is not None:
            x = ops.lora_scale(x, self.excess, self.mine)
        if self.a is not None:
            x = ops.lora_expand(ops.embedding(tokens, self.a, self.first), x, self.b, self.mine, 0)
        if self.added is not None:
            x = ops.add_positions(x, self.at[: len(x)], self.added, 0)
        return x
