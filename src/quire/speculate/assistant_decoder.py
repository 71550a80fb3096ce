"""The decoder of a model that drafts by the keys and values of its target, and the head that scores likely tokens
alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32
from quire.model.batch import Batch
from quire.model.net.decoder import Decoder, Wanted
from quire.model.net.parts import Linear
from quire.ops.arrays import Array, cast_to
from quire.ops.backend import Ops


@dataclass(frozen=True)
class AssistantDecoder(Decoder):
    """A `Decoder` whose tokens are embedded as the target's, each joined with a hidden row.

    `given` [rows, width]: the first are of the rows of the batch; `kept`, alike: what `back` makes of the rows that
    want logits is left in the first, which stands for the target's hidden row of the token that they say.
    """

    join: Linear = field(kw_only=True)
    back: Linear = field(kw_only=True)
    given: Array = field(kw_only=True)
    kept: Array = field(kw_only=True)

    def enter(self, batch: Batch) -> Array:
        """The stream x [T, hidden]."""
        embedded = super().enter(batch)
        return self.join(self.ops, self.ops.join_columns((embedded, self.given[: len(batch.tokens)])))

    def last(self, x: Array, delta: Array, batch: Batch, wanted: Wanted) -> Array:
        """Implement `Decoder`, and leave rows of the target's width."""
        h = super().last(x, delta, batch, wanted)
        self.ops.place_columns(self.kept, self.back(self.ops, h), 0)
        return h


def unscored(ops: Ops, h: Array) -> Array:
    """Rows [R, hidden] that the head reads, in the place of logits."""
    return h


@dataclass(frozen=True)
class TokenClusters:
    """Logits of the tokens in the `chosen` likeliest clusters; all others have one below the least of these.

    `centroids`: a row of each cluster. `table` [V, hidden]: a row of each token. `tokens` [clusters, tokens of one]
    int32. So a step of a model with 262,144 tokens and 2,048 clusters, of which 32 are chosen, reads a 64th of the
    table.
    """

    centroids: Linear
    table: Array
    tokens: NDArray[np.int32]
    chosen: int

    def __call__(self, ops: Ops, h: Array) -> Array:
        """What the head reads, [R, hidden] -> logits f32 [R, V]."""
        h = ops.copy_out(h)  # a step begins with the memory that they lie in
        scores = ops.host(ops.compute(lambda: self.centroids(ops, h), together=False))
        likely = np.argpartition(-scores, self.chosen - 1, axis=1)[:, : self.chosen]
        full: Any = ops.zeros((len(h), len(self.table)))
        for row, clusters in enumerate(likely):
            tokens = self.tokens[clusters].reshape(-1)
            found: Any = cast_to(self.table[tokens], F32) @ cast_to(h[row], F32)
            full[row] = found.min() - 1.0
            full[row, tokens] = found
        return cast(Array, full)
