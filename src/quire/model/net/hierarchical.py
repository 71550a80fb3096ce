"""Two stacks of layers that run in turns, each on the sum of what both made last (HRM, Wang et al. 2025).

The stream is two side by side: that of the stack which runs, and what the other one made, which waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.decoder import Layer, Wanted, chosen
from quire.model.net.parts import Norm
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache


@dataclass(frozen=True)
class Turn:
    """What is between two runs: `norm` of what was made. `repeats`: the same stack runs again."""

    norm: Norm
    repeats: bool

    def __call__(self, ops: Ops, x: Array, width: int) -> tuple[Array, Array]:
        """x [T, 2 * width], given up -> both streams as the next run finds them, and the running one, copied."""
        made = self.norm(ops, ops.take_columns(x, 0, width))
        total = ops.add(ops.take_columns(x, width, width), made)
        if not self.repeats:
            x = ops.place_columns(x, made, width)
        return x, total


@dataclass(frozen=True)
class TurnsBlock:
    """A `Block` of a layer in a stack. `norm`: before attention; `turn`: what is before the first layer of a run."""

    norm: Norm
    turn: Turn | None = None

    def __call__(
        self, ops: Ops, layer: Layer, x: Array, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted
    ) -> tuple[Array, Array]:
        """x, h [T, 2 * hidden], h the streams themselves -> streams, and what is added to them, [R, 2 * hidden]."""
        width = x.shape[1] // 2
        x, running = (x, ops.take_columns(x, 0, width)) if self.turn is None else self.turn(ops, x, width)
        attended = layer.attention(ops, layer, self.norm(ops, running), batch, cache, wanted)
        running, h = layer.mlp_norm.add(ops, chosen(ops, running, wanted), attended)
        x = ops.place_columns(chosen(ops, x, wanted), running, 0)
        return x, ops.join_columns((layer.mlp(ops, h), ops.scale(running, 0.0)))


@dataclass(frozen=True)
class StartedTurns:
    """The embedded tokens, which wait as the second stack's, beside their sum with what the first stack starts from.

    `start`: a norm of weights 0 and of that as its bias, which makes the same row of each.
    """

    start: Norm

    def __call__(self, ops: Ops, x: Array, batch: Batch) -> Array:
        """x [T, hidden] -> [T, 2 * hidden]."""
        joined: Array = ops.join_columns((ops.add(self.start(ops, x), x), x))
        return joined


@dataclass(frozen=True)
class LastTurn:
    """The norm of what the last run made."""

    norm: Norm

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [R, 2 * hidden] -> [R, hidden]."""
        return self.norm(ops, ops.take_columns(x, 0, x.shape[1] // 2))

    def add(self, ops: Ops, x: Array, delta: Array) -> tuple[Array, Array]:
        """(x + delta, its norm); x is given up."""
        x = ops.add(x, delta)
        return x, self(ops, x)
