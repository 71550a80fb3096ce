"""Which replicas of a cluster serve, start, or end what they have, and how much of each there is."""

from __future__ import annotations

import numpy as np

from quire.simulate.replica import Replica


class Fleet:
    """`ready`: may get requests; `starting`; `draining`: gets no more, and is gone with its last. `flight`: requests.

    `paid`: how many replicas there are at all; `replica_seconds`: that over time, up to the last `account`.
    """

    def __init__(self, count: int, ready: int) -> None:
        self.ready, self.starting, self.draining = (np.zeros(count, bool) for _ in range(3))
        self.flight = np.zeros(count, np.int64)
        self.ready[:ready] = True
        self.paid = self._before = ready
        self.replica_seconds = self._since = 0.0

    def runs(self, at: int) -> bool:
        """Whether it computes."""
        return bool(self.ready[at] or self.draining[at])

    @property
    def serving(self) -> int:
        """How many get requests."""
        return int(self.ready.sum())

    @property
    def coming(self) -> int:
        """How many do or will."""
        return int(self.ready.sum() + self.starting.sum())

    def account(self, now: float, whole: bool = False) -> None:
        """Note that it is `now`: add up what was paid for where that has changed, or the `whole`."""
        if whole or self.paid != self._before:
            self.replica_seconds += (now - self._since) * self._before
            self._since, self._before = now, self.paid

    def begin(self, at: int) -> None:
        """Note that a replica is started."""
        self.starting[at], self.ready[at], self.draining[at] = True, False, False
        self._count()

    def serve(self, at: int) -> None:
        """Note that a replica gets requests from now on."""
        self.starting[at], self.ready[at], self.draining[at] = False, True, False
        self._count()

    def drain(self, at: int) -> None:
        """Note that a replica gets no more."""
        self.ready[at], self.starting[at], self.draining[at] = False, False, bool(self.flight[at])
        self._count()

    def enter(self, at: int) -> None:
        """Note that a replica has one more request."""
        self.flight[at] += 1

    def leave(self, at: int) -> None:
        """Note that a replica has one less."""
        self.flight[at] -= 1
        if self.draining[at] and not self.flight[at]:
            self.draining[at] = False
            self._count()

    def spare(self, count: int) -> list[int]:
        """Choose so many replicas at most that could serve and do not: those that drain first, which have their
        caches."""
        off = ~(self.ready | self.starting | self.draining)
        return [*np.flatnonzero(self.draining).tolist(), *np.flatnonzero(off).tolist()][:count]

    def surplus(self, count: int) -> list[int]:
        """Choose so many replicas at most to do without: those that start, then those that have least to do."""
        ready = np.flatnonzero(self.ready)
        idle = ready[np.argsort(self.flight[ready], kind="stable")]
        return [*np.flatnonzero(self.starting).tolist()[::-1], *idle.tolist()][:count]

    def _count(self) -> None:
        self.paid = int(self.ready.sum() + self.starting.sum() + self.draining.sum())


def in_flight(replicas: list[Replica], fleet: Fleet) -> tuple[int, int, float]:
    """Sequences in batches and waiting ones, over all; share of the KV blocks of those that run that have an owner."""
    live = [replica for at, replica in enumerate(replicas) if fleet.runs(at)]
    running, waiting = sum(len(r.scheduler.running) for r in live), sum(r.waiting for r in live)
    blocks = sum(r.setup.blocks for r in live)
    return running, waiting, sum(r.used_blocks for r in live) / max(1, blocks)
