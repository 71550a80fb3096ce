"""Which request ends engines: those that were in the batch of one that died run alone, one after the other.

At once where the engine ended by itself (a fault, an exit, a hang), after the second time where it was killed, as
whoever kills mostly means the process and not a request. One that ends an engine alone (for the second time, where it
is killed) gets an error; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.core.errors import EngineFailure
from quire.core.request import Output
from quire.engine.client import EngineKilled, Interrupted
from quire.engine.processes.unfinished import UnfinishedRequest

TRIED = 2
"""Tokens that a request must give alone before it counts as harmless: one step may have been under way already."""
TIMES = 3
"""Deaths by SIGKILL in a row, without a token, after which one that runs alone is the reason if there is another."""


class SuspectTrial:
    """Requests that are still to be tried, of an engine whose batch has `most` sequences."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: list[UnfinishedRequest] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, kept: UnfinishedRequest) -> bool:
        return kept in self._waiting

    def blame(self, kept: dict[str, UnfinishedRequest], failure: EngineFailure) -> list[Output]:
        """Count a death against the batch, and choose whom to try alone.

        `kept`: what the engine had, from which one that is known to kill is taken; its errors.
        """
        killed = isinstance(failure, EngineKilled)
        if isinstance(failure, Interrupted):
            for each in self._waiting[:1]:
                each.alone = False
            return []
        if self._waiting:
            return self._convict(kept, killed)
        running = [each for each in kept.values() if not each.paused]
        batch = [each for each in running if each.started]
        batch += [each for each in running if not each.started][: self._most]
        for each in batch:
            each.died()
        self._waiting = [each for each in batch if not killed or each.deaths > 1]
        return []

    def _convict(self, kept: dict[str, UnfinishedRequest], killed: bool) -> list[Output]:
        alone = self._waiting[0]
        if alone.request.id not in kept:
            self._waiting.pop(0)
        elif killed and alone.deaths < TIMES:
            alone.died()
        else:
            del kept[alone.request.id]
            return self._waiting.pop(0).condemned()
        return []

    def over(
        self,
        kept: Mapping[str, UnfinishedRequest],
        hand_over: Callable[[UnfinishedRequest], None],
        withdraw: Callable[[UnfinishedRequest], None],
    ) -> bool:
        """The first runs alone; once it gave tokens, ended or left, the next does. Whether all have been tried."""
        while self._waiting:
            first = self._waiting[0]
            if kept.get(first.request.id) is first:
                if not first.alone:
                    first.alone = True
                    hand_over(first)
                    return False
                if first.gained < TRIED:
                    return False
                first.deaths, first.alone = 0, False
                withdraw(first)
            self._waiting.pop(0)
        return True
