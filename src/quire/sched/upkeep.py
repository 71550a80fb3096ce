"""What is done with blocks before the rows of the next plan, whichever plan that is."""

from __future__ import annotations

from collections.abc import Sequence

from quire.cache.tiers import Tiers
from quire.core.plan import NO_WORK, BlockWork, Save


class Upkeep:
    """Gathers blocks to be wiped and slots to be moved, beside what `tiers` want to be saved and filled."""

    def __init__(self, tiers: Tiers | None) -> None:
        self._tiers = tiers
        self.wipes: list[int] = []
        self.moves: list[tuple[int, int, int]] = []

    def take(self, copies: Sequence[tuple[int, int]] = (), more: Sequence[Save] = ()) -> BlockWork:
        """What was gathered since the last call, the block copies of a plan, and `more` blocks to be saved."""
        saves, fills = ((), ()) if self._tiers is None else self._tiers.take()
        if not (self.wipes or self.moves or saves or fills or copies or more):
            return NO_WORK
        (wipes, self.wipes), (moves, self.moves) = (self.wipes, []), (self.moves, [])
        return BlockWork(tuple(moves), (*saves, *more), tuple(wipes), fills, tuple(copies))
