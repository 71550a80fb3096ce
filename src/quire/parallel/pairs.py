"""Which of a step's pairs (token, choice) a rank computes where experts are divided, and how outputs are exchanged.
See docs/design/expert-parallel.md.

Every rank has all rows, and knows who computes what. Each computes the pairs of its own experts, sends the outputs to
the ranks that sum up the rows they are of (csrc/pairs.cpp), and these add them in the order of a row's choices: no bit
of a result depends on who held what.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from quire.core.dtypes import I32, I64
from quire.ops.arrays import Array, Host, address
from quire.ops.backend import Ops
from quire.ops.descriptors import HomesDescriptor
from quire.ops.native import check
from quire.parallel.experts import Held


@dataclass(frozen=True)
class Pairs:
    """One rank's pairs, int32. P = T * top_k is the room for them; offsets[0, -1] of it are in use, zeros behind.

    tokens [P, 1]: the row that each reads, by expert; offsets [1, held + 1] of this rank's experts; order [P, 1]: which
    of them is sent next, sends [world]: how many to each rank; places [own rows, top_k]: where what is received of this
    rank's rows lies.
    """

    tokens: Array
    order: Array
    offsets: Array
    sends: Array
    places: Array


@cache
def row_parts(rows: int, world: int) -> tuple[int, ...]:
    """How many rows each rank sums up, the first ones first."""
    starts = [-(-rank * rows // world) for rank in range(world + 1)]
    return tuple(stop - start for start, stop in pairwise(starts))


class PairDivider:
    """Divides the pairs of one layer. `held`: who has which of its `experts`; `rank`: this one. `idle` choices behind
    the experts are nobody's: places of theirs are 0.

    `counted` int64 [experts + world + 1] grows by each expert's pairs, each rank's, and those of the rank with most.
    """

    def __init__(self, held: Held, rank: int, counted: Host, idle: int = 0) -> None:
        experts = len(check(counted, "counted pairs", I64, -1)) - len(held) - 1
        self.world, self.rank, self.held = len(held), rank, len(held[rank])
        homes = [[r for r, own in enumerate(held) if e in own] for e in range(experts)]
        if not all(homes):
            raise ValueError(f"expert {homes.index([])} is held by no rank")
        most = max(map(len, homes))
        ranks = np.array([each + [-1] * (most - len(each)) for each in homes], np.int32)
        own = {e: place for place, e in enumerate(held[rank])}
        local = np.array([own.get(e, -1) for e in range(experts)], np.int32)
        self._homes = HomesDescriptor(
            ranks=address(ranks), local=address(local), experts=experts, copies=most,
            held=self.held, rank=rank, world=self.world, idle=idle,
        )  # fmt: skip
        self._homes.kept = ranks, local
        self.counted = counted

    def __call__(self, ops: Ops, ids: Array) -> Pairs:
        """ids int32 [T, top_k], T > 0, the same on all ranks."""
        chosen = check(ops.host(ids), "divide_pairs ids", I32, -1, -1)
        rows, top_k = chosen.shape
        own = row_parts(rows, self.world)[self.rank]
        shapes = (rows * top_k, 1), (rows * top_k, 1), (1, self.held + 1), (1, self.world), (max(own, 1), top_k)
        tokens, order, offsets, sends, places = outs = [ops.empty(n, width, I32) for n, width in shapes]
        ops.native("divide_pairs", *map(ops.host, outs), self.counted, chosen, self._homes, rows, top_k)
        return Pairs(tokens, order, offsets, sends[0], places[:own])
