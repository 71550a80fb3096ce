"""How many tokens to draft: as many as give most expected tokens a second, as steps and drafts were timed.

Of n drafted tokens, each kept with probability p, a step gives 1 + p + ... + p^n tokens (Leviathan et al. 2023, eq. 1).
Memory-bound steps take hardly longer for more rows; once they do, drafts stop paying and none are made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from quire.core.sequence import Sequence

SIZES = (*range(1, 9), 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 1024, 2048)
"""Rows of a step that are timed apart."""
RECENT = 0.8
"""Weight of what was known beside a new time."""
MEMORY = 0.9
"""The same of a sequence's kept and lost tokens, a verification at a time."""
PRIOR = 2.0
"""Tokens that what all sequences did counts for in one that is new."""
START = (2.8, 4.0)
"""Kept and tried tokens before anything is known: 0.7."""
MARGIN = 1.02
"""Drafts must promise that much more than none: figures are noisy, and drafting has costs that are not seen here."""
PAUSE, LONGEST_PAUSE = 8, 256
"""Steps without drafts before they are tried again, doubled each time it did not pay."""


class Times:
    """Seconds of a step by its rows, forgetting slowly. Sizes never seen are taken for as fast as the next smaller."""

    def __init__(self) -> None:
        self._seconds = np.full(len(SIZES), np.nan)
        self._filled = np.zeros(SIZES[-1] + 1)

    def add(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took so long."""
        place = min(bisect_right(SIZES, rows) - 1, len(SIZES) - 1)
        old = self._seconds[place]
        # A single step that was held up (a page fault, another process) must not count as what such steps cost.
        seconds = seconds if np.isnan(old) else min(seconds, 4 * float(old))
        self._seconds[place] = seconds if np.isnan(old) else RECENT * old + (1 - RECENT) * seconds
        known = ~np.isnan(self._seconds)
        sizes, times = np.array(SIZES)[known], np.maximum.accumulate(self._seconds[known])
        self._filled = np.interp(np.arange(SIZES[-1] + 1), sizes, times)

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of steps of so many rows [n]; zeros while nothing is known."""
        found: NDArray[np.float64] = self._filled[np.minimum(rows, SIZES[-1])]
        return found


class CostModel:
    """Chooses the lengths of drafts, and learns from what became of them. `passes`: each drafted token is a pass."""

    def __init__(self, passes: bool, most: int) -> None:
        self._passes, self._most = passes, most
        self._step, self._pass = Times(), Times()
        self._all = START
        self._pause, self._idle = PAUSE, 0

    def depth(self, seqs: Rows[Sequence], rows: int) -> int:
        """How many tokens to draft for each of `seqs`, in a step that has `rows` rows without drafts."""
        p = self._acceptance(seqs)
        depths = np.arange(self._most + 1)
        gained = (p[:, None] ** depths).cumsum(1).sum(0) - len(seqs)
        seconds = self._step.of(rows + len(seqs) * depths) + depths * self._pass.of(np.array(len(seqs)))
        return self._best(rows + gained, seconds)

    def cut(self, seqs: Rows[Sequence], rows: int) -> None:
        """Cut drafts that cost nothing to make to what is worth verifying; the likeliest tokens stay."""
        p = self._acceptance(seqs)
        places = [(s, j) for s, seq in enumerate(seqs) for j in range(1, len(seq.draft) + 1)]
        if not places:
            return
        chances = np.array([p[s] ** j for s, j in places])
        order = np.argsort(-chances, kind="stable")
        gained = np.concatenate(([0.0], chances[order].cumsum()))
        count = self._best(rows + gained, self._step.of(rows + np.arange(len(gained))))
        kept = [0] * len(seqs)
        for at in order[:count].tolist():
            kept[places[at][0]] += 1
        for seq, length in zip(seqs, kept, strict=True):
            del seq.draft[length:]

    def _best(self, tokens: NDArray[np.float64], seconds: NDArray[np.float64]) -> int:
        """The place of the highest rate; 0 unless it is worth it, but now and then another is tried."""
        if not seconds[0]:
            return 0
        rates = tokens / seconds
        best = int(rates.argmax())
        if rates[best] >= MARGIN * rates[0]:
            self._idle, self._pause = 0, PAUSE
            return best
        self._idle += 1
        if self._idle < self._pause:
            return 0
        self._idle, self._pause = 0, min(2 * self._pause, LONGEST_PAUSE)
        return min(2, len(rates) - 1)

    def _acceptance(self, seqs: Rows[Sequence]) -> NDArray[np.float64]:
        kept, tried = np.array([seq.acceptance for seq in seqs]).T
        usual = self._all[0] / self._all[1]
        found: NDArray[np.float64] = (kept + PRIOR * usual) / (tried + PRIOR)
        return found

    @property
    def likely(self) -> bool:
        """Whether drafts of the next steps are likely."""
        return self._idle < PAUSE

    def verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens `accepted` were kept."""
        tried = accepted + (accepted < drafted)
        kept, before = seq.acceptance
        seq.acceptance = (MEMORY * kept + accepted, MEMORY * before + tried)
        self._all = (0.98 * self._all[0] + 0.02 * accepted, 0.98 * self._all[1] + 0.02 * tried)

    def stepped(self, rows: int, seconds: float) -> None:
        """A step of decodes and drafts, `rows` in all, took so long."""
        self._step.add(rows, seconds)

    def drafted(self, seqs: int, passes: int, seconds: float) -> None:
        """Drafts of `seqs` sequences took `passes` passes."""
        if passes:
            self._pass.add(seqs, seconds / passes)
