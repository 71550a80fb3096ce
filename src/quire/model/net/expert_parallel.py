"""Experts that are divided over ranks: each computes the pairs of those it holds, outputs go all to all.

Activations are the same on all ranks before and after, so rows need not be sent to the experts (GShard, Lepikhin et
al. 2021, sends them), only outputs to who sums them up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.model.net.moe import Experts
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.parallel.comm import Comm
from quire.parallel.pairs import PairDivider, row_parts


@dataclass(frozen=True)
class ExpertParallel:
    """Each rank has the experts that `divide` says, in the order in which it counts them; `counted`: in all layers."""

    divide: PairDivider
    comm: Comm
    counted: Array

    def __call__(self, ops: Ops, own: Experts, x: Array, ids: Array, weights: Array) -> Array:
        """Implement `Holders`: the bits of one rank with all of them."""
        rows, top_k = ids.shape
        parts = row_parts(rows, self.comm.world)
        count, first = parts[self.comm.rank], sum(parts[: self.comm.rank])
        pairs = self.divide(ops, ids)
        y = own(ops, x, (pairs.tokens, pairs.order, pairs.offsets, ops.put(np.ones((rows * top_k, 1), np.float32))))
        found, _ = self.comm.all_to_all(ops, y, pairs.sends, max(parts) * top_k)
        summed: Array = ops.combine(found[: count * top_k], pairs.places, weights[first : first + count])
        return self.comm.all_gather(ops, summed, parts)
