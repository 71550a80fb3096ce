"""Whose grammar is read next.

Tenants share readers by the CPU time that their grammars take: the one that has used the least goes first, and of its
own the one that came first. What turns out to take long gives way to what was not tried yet, whoever asked for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from quire.core.errors import Overloaded
from quire.text.structured.vocabulary import Vocabulary

OF_A_TENANT, OF_ALL = 64, 512
"""Grammars that may wait."""
REMEMBERED = 1024
"""Tenants whose use is remembered while none of theirs waits."""


@dataclass(eq=False)
class GrammarJob:
    """A grammar to be read for a tenant; `key`: jobs with the same one give the same.

    `asked`: whoever waits for it. `slow`: it has taken the time of a first try already.
    """

    tenant: str
    key: tuple[bytes, int]
    job: dict[str, Any]
    ends: frozenset[int]
    vocabulary: Vocabulary
    asked: list[Future[Any]] = field(default_factory=list)
    slow: bool = False

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits."""
        return not all(future.cancelled() for future in self.asked)


class GrammarJobs:
    """Jobs that wait, at most `OF_A_TENANT` and `OF_ALL`. Its owner has a lock."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[GrammarJob]] = {}
        self._used: dict[str, float] = {}
        self._now = 0.0

    def __iter__(self) -> Iterator[GrammarJob]:
        return (job for jobs in self._waiting.values() for job in jobs)

    def add(self, job: GrammarJob, seconds: float) -> None:
        """Let `job` wait; `Overloaded` where too many do, which should come back after some `seconds`."""
        own = self._wanted(job.tenant)
        if own >= OF_A_TENANT or sum(map(self._wanted, list(self._waiting))) >= OF_ALL:
            whose = "of this tenant " if own >= OF_A_TENANT else ""
            raise Overloaded(
                f"{own if whose else OF_ALL} grammars {whose}wait to be read already; try again in {seconds:g} s",
                retry_after=math.ceil(seconds),
            )
        self._enter(job.tenant).append(job)

    def put_off(self, job: GrammarJob) -> None:
        """Let a job that was tried and took long wait again; it had a place."""
        job.slow = True
        self._enter(job.tenant).append(job)

    def take(self, whole: bool) -> GrammarJob | None:
        """The next job, of which nobody is to wait any more; None: there is none. `whole`: one that is slow may be."""
        for slow in (True, False) if whole else (False,):
            for tenant in sorted(self._waiting, key=lambda name: self._used[name]):
                if (job := self._first(tenant, slow)) is not None:
                    self._now = max(self._now, self._used[tenant])
                    return job
        return None

    def charge(self, tenant: str, seconds: float) -> None:
        """Count CPU time against `tenant`."""
        self._used[tenant] = self._used.get(tenant, self._now) + seconds
        if len(self._used) > REMEMBERED + len(self._waiting):
            self._used = {name: self._used[name] for name in (*self._waiting, tenant)}

    def _enter(self, tenant: str) -> deque[GrammarJob]:
        """The jobs of a tenant. One that comes anew is as far as whoever was served last: it gains by no pause."""
        if tenant not in self._waiting:
            self._waiting[tenant] = deque()
            self._used[tenant] = max(self._now, self._used.get(tenant, 0.0))
        return self._waiting[tenant]

    def _wanted(self, tenant: str) -> int:
        """How many jobs of a tenant wait; those that nobody wants are dropped."""
        jobs = deque(job for job in self._waiting.get(tenant, ()) if job.wanted)
        self._waiting[tenant] = jobs
        self._drop_empty(tenant)
        return len(jobs)

    def _first(self, tenant: str, slow: bool) -> GrammarJob | None:
        for job in [job for job in self._waiting[tenant] if job.slow is slow]:
            self._waiting[tenant].remove(job)
            if job.wanted:
                self._drop_empty(tenant)
                return job
        return None

    def _drop_empty(self, tenant: str) -> None:
        if not self._waiting[tenant]:
            del self._waiting[tenant]
