"""Orders in which waiting sequences are admitted and running ones get blocks; the last of them is preempted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows

from quire.core.request import Request
from quire.core.sequence import Sequence
from quire.sched.queue import WaitingQueue

Rank = tuple[float, ...]
OUTPUT = 2.0
"""What a generated token counts beside one of a prompt: it takes a row of a step of its own."""
CREDIT = 1000.0
"""What a tenant of weight 1 may have saved up, in tokens: a few requests. Without it one that uses three quarters of
its share waits as long for a first token as if the machine had half its speed."""
REMEMBERED = 10_000
"""Tenants whose counters are kept in any case."""


class Policy:
    """First come, first served."""

    def order(self, seq: Sequence, ticket: int) -> tuple[float, int, int]:
        """Place among all, smallest first. `ticket` counts requests as they arrive; a preempted one keeps its place."""
        return (0.0, ticket, seq.index)

    def queue(self) -> WaitingQueue:
        """The waiting line."""
        return WaitingQueue()

    def rank(self, seq: Sequence) -> Rank:
        """Place at this moment, smallest first."""
        return seq.order

    def urgency(self, seq: Sequence) -> float:
        """Whose prompt gets its part of a step first, smallest first; all alike here."""
        return 0.0

    def joins(self, request: Request, active: Iterable[Request]) -> None:
        """`request` comes, beside those that are not finished."""

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
        last = max(running, key=self.rank)
        return last if last.order[0] > head.order[0] else None


class Fair(Policy):
    """Who was served least, by its weight, comes first: virtual token counters (VTC, Sheng et al. 2024).

    A tenant that comes back after a pause begins a little before the one that was served least meanwhile: `CREDIT`
    is saved up and no more, so who asks seldom does not wait for who always asks, and shares are those of the weights.
    Where the batch is full, one with fewer places than its share takes one from who has most beyond his.
    """

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}

    def queue(self) -> WaitingQueue:
        """A line for each tenant."""
        return FairQueue(self)

    def counter(self, tenant: str) -> float:
        """Tokens that `tenant` was served, divided by its weight."""
        return self._counters.get(tenant, 0.0)

    def joins(self, request: Request, active: Iterable[Request]) -> None:
        """A tenant that had no work begins near the least of those that have."""
        tenants = {each.tenant for each in active}
        if tenants and request.tenant not in tenants:
            least = min(map(self.counter, tenants)) - CREDIT / request.weight
            if len(self._counters) > REMEMBERED:
                self._counters = {each: served for each, served in self._counters.items() if served > least}
            self._counters[request.tenant] = max(self.counter(request.tenant), least)

    def rank(self, seq: Sequence) -> Rank:
        """By what its tenant was served."""
        return (self.counter(seq.request.tenant), *seq.order)

    def urgency(self, seq: Sequence) -> float:
        """By what its tenant was served."""
        return self.counter(seq.request.tenant)

    def served(self, seq: Sequence, count: int) -> None:
        """Count prompts and outputs; what a preemption computes again is not the tenant's fault."""
        prompt = max(0, min(seq.computed, seq.prompt_len) - (seq.computed - count)) if not seq.preemptions else 0
        cost = prompt + OUTPUT * (seq.computed >= len(seq.tokens))
        self._counters[seq.request.tenant] = self.counter(seq.request.tenant) + cost / seq.request.weight

    def displaced(self, running: Rows[Sequence], head: Sequence, places: int) -> Sequence | None:
        """The newest of the tenant that has most places beyond its share, if the one that waits has fewer than its."""
        weights = {seq.request.tenant: seq.request.weight for seq in (*running, head)}
        held = Counter(seq.request.tenant for seq in running)
        share = places / sum(weights.values())
        over = {tenant: held[tenant] - share * weight for tenant, weight in weights.items()}
        tenant = max(over, key=lambda each: over[each])
        if over[head.request.tenant] > -1.0 or over[tenant] < 1.0:
            return None
        return max((seq for seq in running if seq.request.tenant == tenant), key=lambda seq: seq.order)


class FairQueue(WaitingQueue):
    """A line for each tenant; the head is the first of the tenant that was served least."""

    def __init__(self, policy: Fair) -> None:
        super().__init__()
        self._policy = policy
        self._lines: dict[str, WaitingQueue] = {}

    def push(self, seq: Sequence) -> None:
        """Insert into the line of its tenant."""
        self._lines.setdefault(seq.request.tenant, WaitingQueue()).push(seq)

    def head(self) -> Sequence:
        """The next to be admitted."""
        return min((line.head() for line in self._lines.values()), key=self._policy.rank)

    def pop(self) -> Sequence:
        """Remove and return the head."""
        head = self.head()
        self.remove(head)
        return head

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that is known to wait."""
        line = self._lines[seq.request.tenant]
        line.remove(seq)
        if not len(line):
            del self._lines[seq.request.tenant]

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for line in list(self._lines.values()):
            yield from line


POLICIES: dict[str, type[Policy]] = {"fcfs": Policy, "priority": Priority, "fair": Fair}
