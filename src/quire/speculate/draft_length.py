"""How many tokens to draft: as many as give most expected tokens a second, as steps and drafts were timed.
See docs/design/speculation.md.

Of n drafted tokens, each kept with probability p, a step gives 1 + p + ... + p^n tokens (Leviathan et al. 2023, eq. 1).
Memory-bound steps take hardly longer for more rows; once they do, drafts stop paying and none are made.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence as GenericSequence

import numpy as np
from numpy.typing import NDArray

from quire.core.sequence import Sequence

SIZES = (*range(1, 9), 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 1024, 2048)
"""Rows of a step that are timed apart."""
RECENT = 7
"""Times of a size that count, by their median: a step that was held up (another process, a page fault) does not."""
MEMORY = 0.9
"""The same of a sequence's kept and lost tokens, a verification at a time."""
PRIOR = 2.0
"""Tokens that what all sequences did counts for in one that is new."""
START = (2.8, 4.0)
"""Kept and tried tokens before anything is known: 0.7."""
MARGIN = 1.05
"""Drafts must promise that much more than none: figures are noisy, and drafting has costs that are not seen here."""
PAUSE, LONGEST_PAUSE = 8, 256
"""Steps without drafts before they are tried again, doubled each time it did not pay."""
TRIED = 2
"""Sequences, and tokens of each, that are drafted for in a trial."""
REFRESH = 32
"""Every so many steps with drafts one goes without, so that what such a step takes stays known."""


class Times:
    """Seconds of a step by its rows, forgetting slowly. Sizes never seen are taken for as fast as the next smaller.

    The first step of a size does not count: it is recorded then, which takes longer than many replays.
    """

    def __init__(self) -> None:
        self._recorded: set[int] = set()
        self._recent: dict[int, deque[float]] = {}
        self._filled, self._stale = np.zeros(SIZES[-1] + 1), False

    def add(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took so long."""
        if rows not in self._recorded:
            self._recorded.add(rows)
            return
        size = SIZES[bisect_right(SIZES, rows) - 1]
        self._recent.setdefault(size, deque(maxlen=RECENT)).append(seconds)
        self._stale = True

    @property
    def known(self) -> bool:
        """Whether there is any."""
        return bool(self._recent)

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of steps of so many rows [n]; zeros while nothing is known."""
        if self._stale:
            sizes = sorted(self._recent)
            times = np.maximum.accumulate([statistics.median(self._recent[size]) for size in sizes])
            self._filled, self._stale = np.interp(np.arange(SIZES[-1] + 1), sizes, times), False
        found: NDArray[np.float64] = self._filled[np.minimum(rows, SIZES[-1])]
        return found


def _chances(seq: Sequence, p: float) -> NDArray[np.float64]:
    """How likely each drafted token [n] is kept: as those before it are, and where its elder siblings are not."""
    chances: list[float] = []
    siblings: dict[int, int] = {}
    for node in range(len(seq.draft.tokens)):
        parent = seq.draft.parents[node] if seq.draft.parents else node - 1
        elder = siblings[parent] = siblings.get(parent, -1) + 1
        chances.append((chances[parent] if parent >= 0 else 1.0) * p * (1 - p) ** elder)
    return np.array(chances)


class CostModel:
    """Chooses the lengths of drafts, and learns from what became of them.

    `passes`: each of up to `most` tokens one after the other is a pass, or (`at_once`) all are one; `nodes`: in all,
    more where drafts branch. Then a depth counts as kept where any of its tokens is.
    """

    def __init__(self, passes: bool, most: int, nodes: int = 0, at_once: bool = False) -> None:
        self._passes, self._most, self._nodes, self._at_once = passes, most, nodes or most, at_once
        self._step, self._pass = Times(), Times()
        self._all, self._looking = START, 0.0
        self._pause, self._resting, self._tried, self._turns = PAUSE, 0, False, 0

    def turn(self) -> bool:
        """Whether this step may have drafts; while they do not pay, nobody even looks."""
        if self._resting:
            self._resting -= 1
            return False
        self._turns += 1
        return self._turns % REFRESH > 0

    def depth(self, seqs: GenericSequence[Sequence], rows: int) -> tuple[int, int]:
        """(For how many of `seqs` to draft, how many tokens each), in a step that has `rows` rows without drafts.

        Trees are of their full depth or none: how far one grows is the drafting model's to say.
        """
        p = self._acceptance(seqs)
        depths = np.arange(self._most + 1) if self._nodes == self._most else np.array([0, self._most])
        nodes = depths if self._nodes == self._most else np.array([0, self._nodes])
        gained = np.array([(p[:, None] ** np.arange(1, depth + 1)).sum() for depth in depths])
        passes = np.minimum(depths, 1) if self._at_once else depths
        width = len(seqs) * (1 + depths if self._at_once else np.ones_like(depths))
        seconds = self._step.of(rows + len(seqs) * nodes) + passes * self._pass.of(width)
        best = self._best(rows + gained, seconds)
        if best or not self._tries():
            return len(seqs) if best else 0, int(nodes[best])
        return TRIED, min(TRIED, self._most)

    def cut(self, seqs: GenericSequence[Sequence], rows: int) -> None:
        """Cut drafts that cost nothing to make to what is worth verifying; the likeliest tokens stay.

        Steps are of few sizes then, so that each is timed often and recorded once.
        """
        p = self._acceptance(seqs)
        places = [(s, node) for s, seq in enumerate(seqs) for node in range(len(seq.draft.tokens))]
        if not places:
            return
        chances = np.concatenate([_chances(seq, p[s]) for s, seq in enumerate(seqs)])
        order = np.argsort(-chances, kind="stable")
        gained = np.concatenate(([0.0], chances[order].cumsum()))
        counts = np.array([n for n in range(len(gained)) if not n or rows + n in SIZES])
        seconds = self._step.of(rows + counts) + (counts > 0) * self._looking
        count = int(counts[self._best(rows + gained[counts], seconds)])
        if not count and self._tries():
            count = TRIED
        kept: list[list[int]] = [[] for _ in seqs]
        for at in sorted(order[:count].tolist()):
            kept[places[at][0]].append(places[at][1])
        for seq, nodes in zip(seqs, kept, strict=True):
            seq.draft.prune(nodes)

    def _best(self, tokens: NDArray[np.float64], seconds: NDArray[np.float64]) -> int:
        """The place of the highest rate; 0 unless it is worth it, or while nothing is known."""
        if not seconds[0]:
            return 0
        rates = tokens / seconds
        best = int(rates.argmax())
        if rates[best] < MARGIN * rates[0]:
            return 0
        self._pause, self._tried = PAUSE, True
        return best

    def _tries(self) -> bool:
        """Whether drafts that do not promise to pay are made once, to see; after that they rest for longer."""
        if not self._step.known:
            return False
        if not self._tried:
            self._tried = True
            return True
        self._tried, self._resting = False, self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return False

    def _acceptance(self, seqs: GenericSequence[Sequence]) -> NDArray[np.float64]:
        kept, tried = np.array([seq.draft.acceptance for seq in seqs]).T
        usual = self._all[0] / self._all[1]
        found: NDArray[np.float64] = (kept + PRIOR * usual) / (tried + PRIOR)
        return found

    @property
    def likely(self) -> bool:
        """Whether drafts of the next steps are likely."""
        return not self._resting

    @property
    def known(self) -> bool:
        """Whether steps were timed; before that there are no drafts."""
        return self._step.known

    def verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """Note that of `drafted` tokens `accepted` were kept."""
        tried = accepted + (accepted < drafted)
        kept, before = seq.draft.acceptance
        seq.draft.acceptance = (MEMORY * kept + accepted, MEMORY * before + tried)
        self._all = (0.98 * self._all[0] + 0.02 * accepted, 0.98 * self._all[1] + 0.02 * tried)

    def stepped(self, rows: int, seconds: float) -> None:
        """A step of decodes and drafts, `rows` in all, took so long."""
        self._step.add(rows, seconds)

    def looked(self, seconds: float) -> None:
        """Looking for drafts that are free, and choosing among them, took so long."""
        self._looking = MEMORY * self._looking + (1 - MEMORY) * seconds

    def drafted(self, limits: GenericSequence[int], seconds: float) -> None:
        """Drafts of so many tokens took so long: passes of a row a sequence, or one of a row more than tokens."""
        if self._at_once:
            self._pass.add(len(limits) + sum(limits), seconds)
        else:
            self._pass.add(len(limits), seconds / min(self._most, max(limits)))
