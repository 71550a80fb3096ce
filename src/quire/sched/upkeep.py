"""What is done with blocks before the rows of the next plan, whichever plan that is."""

from __future__ import annotations

from typing import Any

from quire.cache.tiers import Tiers
from quire.core.plan import Save

Pairs = tuple[tuple[int, int], ...]
Taken = tuple[tuple[int, ...], tuple[tuple[int, int, int], ...], tuple[Save, ...], tuple[tuple[int, Any], ...]]


class Upkeep:
    """Gathers blocks to be wiped and slots to be moved, beside what `tiers` want to be saved and filled."""

    def __init__(self, tiers: Tiers | None) -> None:
        self._tiers = tiers
        self.scrub: list[int] = []
        self.moves: list[tuple[int, int, int]] = []

    def take(self) -> Taken:
        """The last fields of a plan, in their order."""
        (scrub, self.scrub), (moves, self.moves) = (tuple(self.scrub), []), (tuple(self.moves), [])
        saves, fills = ((), ()) if self._tiers is None else self._tiers.take()
        return scrub, moves, saves, fills
