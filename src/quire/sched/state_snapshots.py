"""Chunks end where a recurrent state is to be kept as a snapshot. See docs/design/states.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.cache.states import StateSlots
from quire.core.request import Request
from quire.core.sequence import Sequence
from quire.features.feature import SchedulerFeature
from quire.sched.policy import Rank


class StateSnapshots(SchedulerFeature):
    """Cuts chunks so that a step can store all states that others are to begin with."""

    def __init__(self, states: StateSlots) -> None:
        self._states = states

    def concerns(self, request: Request) -> bool:
        """Every one."""
        return True

    def limit(self, counts: dict[Sequence, int], rank: Callable[[Sequence], Rank]) -> Iterable[Sequence]:
        """Lower `counts` of rows of the next step; nobody waits. What the last step reads may be written now."""
        self._states.begin(counts)
        for seq, count in counts.items():
            counts[seq] = self._states.reach(seq, count)
        return ()

    def reach(self, seq: Sequence, count: int) -> int:
        """How many of the next `count` rows of `seq` the step can have."""
        return self._states.reach(seq, count)
