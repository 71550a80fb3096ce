"""Sequences whose grammars take long have turns: others wait for one of them at a time, and seldom.

A step waits for the masks of all its rows, and for what reads the tokens that were drawn. A grammar may have been
written to make that long. What a sequence says is the same, whenever it has its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeGuard

from quire.core.plan import Chunk
from quire.core.sequence import Guide, Sequence

SLOW = 2e-3
"""Seconds for a token of a sequence, above which it is slow: ordinary schemas take some 0.1 ms."""
SHARE = 0.2
"""Of the time that steps take is left to slow ones while there are others."""


class SlowGuides:
    """Which of the slow ones may have a step. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turns = 0
        self._rest = 0.0

    def resting(self, counts: Iterable[Sequence]) -> list[Sequence]:
        """Those of `counts` that the next step should do without. To ask changes nothing."""
        guided = [seq for seq in counts if seq.guide is not None]
        if not guided:
            return guided
        everyone = list(counts)
        slow = [(guide.turn, i) for i, seq in enumerate(everyone) if _is_slow(guide := seq.guide)]
        if not slow:
            return []
        chosen = -1 if len(slow) < len(everyone) and self._clock() < self._rest else min(slow)[1]
        return [everyone[i] for _, i in slow if i != chosen]

    def began(self, chunks: Iterable[Chunk]) -> None:
        """A step of these begins. What a slow one makes it longer, others have for themselves then."""
        for chunk in chunks:
            if (guide := chunk.seq.guide) is not None and _is_slow(guide):
                self._turns += 1
                guide.turn = self._turns
                self._rest = self._clock() + guide.seconds / SHARE


def _is_slow(guide: Guide | None) -> TypeGuard[Guide]:
    return guide is not None and guide.seconds > SLOW
