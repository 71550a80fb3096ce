"""Orders in which waiting sequences are admitted and running ones get blocks; the last of them is preempted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows
from operator import attrgetter

from quire.core.request import Request
from quire.core.sequence import Sequence
from quire.sched.queue import Queue, Rank, Rising, TenantQueue, WaitingQueue

OUTPUT = 2.0
"""What a generated token counts beside one of a prompt: it takes a row of a step of its own."""
CREDIT = 1000.0
"""What a tenant of weight 1 may have saved up, in tokens: a few requests. Without it one that uses three quarters of
its share waits as long for a first token as if the machine had half its speed."""
REMEMBERED = 10_000
"""Tenants whose counters are kept in any case."""


class Policy:
    """First come, first served. `counts`: whether it is to be told what is `served`."""

    counts = False

    def order(self, seq: Sequence, ticket: int) -> tuple[float, int, int]:
        """Place among all, smallest first. `ticket` counts requests as they arrive; a preempted one keeps its place."""
        return (0.0, ticket, seq.index)

    def queue(self) -> Queue:
        """The waiting line."""
        return WaitingQueue()

    def rank(self, seq: Sequence) -> Rank:
        """Place at this moment, smallest first."""
        return seq.order

    def urgency(self, seq: Sequence) -> float:
        """Whose prompt gets its part of a step first, smallest first; all alike here."""
        return 0.0

    def joins(self, request: Request) -> None:
        """`request` comes."""

    def leaves(self, request: Request) -> None:
        """`request` has ended."""

    def served(self, seq: Sequence, count: int) -> None:
        """`count` tokens of `seq` are computed."""

    def displaced(self, running: Rows[Sequence], head: Sequence, places: int) -> Sequence | None:
        """Who of those that run would leave for `head`, if there is no room: nobody."""
        return None


class Priority(Policy):
    """By the request's `priority`, lower first; among equals first come, first served."""

    def order(self, seq: Sequence, ticket: int) -> tuple[float, int, int]:
        """Place among all."""
        return (float(seq.request.priority), ticket, seq.index)

    def urgency(self, seq: Sequence) -> float:
        """As the queue's."""
        return float(seq.request.priority)

    def displaced(self, running: Rows[Sequence], head: Sequence, places: int) -> Sequence | None:
        """The last, if it is less urgent."""
        last = max(running, key=attrgetter("order"))
        return last if last.order[0] > head.order[0] else None


class Fair(Policy):
    """Who was served least, by its weight, comes first: virtual token counters (VTC, Sheng et al. 2024).

    A tenant that comes back after a pause begins a little before the one that was served least meanwhile: `CREDIT`
    is saved up and no more, so who asks seldom does not wait for who always asks, and shares are those of the weights.
    Where the batch is full, one with fewer places than its share takes one from who has most beyond his.
    """

    counts = True

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._active = Counter[str]()  # requests of each tenant that are not finished
        self._tenants = Rising(lambda tenant: (self.counter(tenant),))

    def queue(self) -> Queue:
        """A line for each tenant."""
        return TenantQueue(self.counter)

    def counter(self, tenant: str) -> float:
        """Tokens that `tenant` was served, divided by its weight."""
        return self._counters.get(tenant, 0.0)

    def joins(self, request: Request) -> None:
        """A tenant that had no work begins near the least of those that have."""
        tenant = request.tenant
        if self._active and tenant not in self._active:
            least = self.counter(self._tenants.least()) - CREDIT / request.weight
            if len(self._counters) > REMEMBERED:
                self._counters = {each: served for each, served in self._counters.items() if served > least}
            self._counters[tenant] = max(self.counter(tenant), least)
        self._active[tenant] += 1
        self._tenants.put(tenant)

    def leaves(self, request: Request) -> None:
        """A tenant whose last request ends has no work."""
        self._active[request.tenant] -= 1
        if not self._active[request.tenant]:
            del self._active[request.tenant]
            self._tenants.drop(request.tenant)

    def rank(self, seq: Sequence) -> Rank:
        """By what its tenant was served."""
        return (self.counter(seq.request.tenant), *seq.order)

    def urgency(self, seq: Sequence) -> float:
        """By what its tenant was served."""
        return self.counter(seq.request.tenant)

    def served(self, seq: Sequence, count: int) -> None:
        """Count prompts and outputs; what a preemption computes again is not the tenant's fault."""
        prompt = max(0, min(seq.computed, seq.prompt_len) - (seq.computed - count)) if not seq.times.preemptions else 0
        cost = prompt + OUTPUT * (seq.computed >= len(seq.tokens))
        self._counters[seq.request.tenant] = self.counter(seq.request.tenant) + cost / seq.request.weight

    def displaced(self, running: Rows[Sequence], head: Sequence, places: int) -> Sequence | None:
        """The newest of the tenant that has most places beyond its share, if the one that waits has fewer than its."""
        weights, held = dict[str, float](), dict[str, int]()
        for seq in (*running, head):
            weights[seq.request.tenant] = seq.request.weight
            held[seq.request.tenant] = held.get(seq.request.tenant, 0) + 1
        held[head.request.tenant] -= 1  # it waits
        share = places / sum(weights.values())
        if held[head.request.tenant] - share * weights[head.request.tenant] > -1.0:
            return None
        over = {tenant: held[tenant] - share * weight for tenant, weight in weights.items()}
        tenant = max(over, key=lambda each: over[each])
        if over[tenant] < 1.0:
            return None
        return max((seq for seq in running if seq.request.tenant == tenant), key=lambda seq: seq.order)


POLICIES: dict[str, type[Policy]] = {"fcfs": Policy, "priority": Priority, "fair": Fair}
