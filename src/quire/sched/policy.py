"""Orders in which waiting sequences are admitted and running ones get blocks, and the waiting lines sorted by them.

The last in order is preempted. Whoever comes, goes or is the next costs the same however many wait.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as GenericSequence
from operator import attrgetter
from typing import Protocol

from quire.core.request import Request
from quire.core.sequence import Sequence

Rank = tuple[float, ...]
LEFT_BEHIND = 64
"""Dead entries that a heap may have beside as many as live ones: small heaps are not made anew all the time."""
OUTPUT = 2.0
"""What a generated token counts beside one of a prompt: it takes a row of a step of its own."""
CREDIT = 1000.0
"""What a tenant of weight 1 may have saved up, in tokens: a few requests. Without it one that uses three quarters of
its share waits as long for a first token as if the machine had half its speed."""
REMEMBERED = 10_000
"""Tenants whose counters are kept in any case."""


class Queue(Protocol):
    """Sequences that wait, in a policy's order."""

    def push(self, seq: Sequence) -> None:
        """Insert at the place its order gives."""
        ...

    def head(self) -> Sequence:
        """The next to be admitted."""
        ...

    def pop(self) -> Sequence:
        """Remove and return the head."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that is known to wait."""
        ...

    def heads(self) -> list[Sequence]:
        """Whoever would be the next if its tenant came first; the head where tenants are not told apart."""
        ...

    def in_order(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """List some of those that wait, as iteration would give them."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class WaitingQueue:
    """Sequences by `Sequence.order`, equals as they came: a heap, O(log n) per change.

    Whoever is removed from within leaves a dead entry, which is dropped when it comes up, or when half are dead.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int, int], int, list[Sequence]]] = []
        self._alive: dict[Sequence, list[Sequence]] = {}  # its entry's last field, which is emptied when it leaves
        self._pushed = 0

    def push(self, seq: Sequence) -> None:
        """Insert at the place its order gives."""
        assert seq not in self._alive, f"{seq} would wait twice"
        self._pushed += 1
        self._alive[seq] = entry = [seq]
        heapq.heappush(self._heap, (seq.order, self._pushed, entry))

    def head(self) -> Sequence:
        """The next to be admitted."""
        return self._heap[0][2][0]

    def pop(self) -> Sequence:
        """Remove and return the head."""
        head = self.head()
        self.remove(head)
        return head

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that is known to wait."""
        self._alive.pop(seq).clear()
        if len(self._heap) > 2 * len(self._alive) + LEFT_BEHIND:
            self._heap = [entry for entry in self._heap if entry[2]]
            heapq.heapify(self._heap)
        while self._heap and not self._heap[0][2]:
            heapq.heappop(self._heap)

    def heads(self) -> list[Sequence]:
        """The head, if there is one."""
        return [self.head()] if self._alive else []

    def in_order(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """List some of those that wait, as iteration would give them."""
        return sorted(seqs, key=lambda seq: seq.order)

    def __len__(self) -> int:
        return len(self._alive)

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2][0] for entry in sorted(self._heap, key=lambda entry: entry[:2]) if entry[2])


class Rising:
    """Names, of which one has the least `key`, where keys mostly rise.

    A heap of what keys were when they were last looked at: one that rose meanwhile is put back when it comes up. Only
    of a key that is new or fell has to be told (`put`), and of a name that is no more (`drop`).
    """

    def __init__(self, key: Callable[[str], Rank]) -> None:
        self._key = key
        self._heap: list[tuple[Rank, str]] = []
        self._listed: dict[str, Rank] = {}

    def put(self, name: str) -> None:
        """Put in a name whose key is new, or may have fallen."""
        key = self._key(name)
        if name not in self._listed or key < self._listed[name]:
            self._listed[name] = key
            heapq.heappush(self._heap, (key, name))

    def drop(self, name: str) -> None:
        """Drop a name that has no key any more."""
        del self._listed[name]
        if len(self._heap) > 2 * len(self._listed) + LEFT_BEHIND:
            self._heap = [(key, each) for each, key in self._listed.items()]
            heapq.heapify(self._heap)

    def least(self) -> str:
        """Whose key is least. IndexError where there is no name."""
        while True:
            known, name = self._heap[0]
            if self._listed.get(name) != known:
                heapq.heappop(self._heap)
                continue
            key = self._key(name)
            if key == known:
                return name
            self._listed[name] = key
            heapq.heapreplace(self._heap, (key, name))


class TenantQueue:
    """A line for each tenant; the head is the first of the tenant whose `counter` is least."""

    def __init__(self, counter: Callable[[str], float]) -> None:
        self._counter = counter
        self._lines: dict[str, WaitingQueue] = {}
        self._numbers: dict[str, int] = {}  # of lines, as they began
        self._began = self._count = 0
        self._tenants = Rising(self._rank)

    def push(self, seq: Sequence) -> None:
        """Insert into the line of its tenant."""
        tenant = seq.request.tenant
        if tenant not in self._lines:
            self._began += 1
            self._lines[tenant], self._numbers[tenant] = WaitingQueue(), self._began
        self._lines[tenant].push(seq)
        self._count += 1
        self._tenants.put(tenant)

    def head(self) -> Sequence:
        """The next to be admitted."""
        return self._lines[self._tenants.least()].head()

    def pop(self) -> Sequence:
        """Remove and return the head."""
        head = self.head()
        self.remove(head)
        return head

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that is known to wait."""
        tenant = seq.request.tenant
        line = self._lines[tenant]
        line.remove(seq)
        self._count -= 1
        if not len(line):
            del self._lines[tenant], self._numbers[tenant]
            self._tenants.drop(tenant)

    def heads(self) -> list[Sequence]:
        """The first of each line."""
        return [line.head() for line in self._lines.values()]

    def in_order(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """List some of those that wait, as iteration would give them."""
        return sorted(seqs, key=lambda seq: (self._numbers[seq.request.tenant], seq.order))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for line in list(self._lines.values()):
            yield from line

    def _rank(self, tenant: str) -> Rank:
        return (self._counter(tenant), *self._lines[tenant].head().order)


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

    def displaced(self, running: GenericSequence[Sequence], head: Sequence, places: int) -> Sequence | None:
        """Who of those that run would leave for `head`, if there is no room: nobody."""
        return None


class Priority(Policy):
    """Policy by the request's `priority`, lower first; among equals first come, first served."""

    def order(self, seq: Sequence, ticket: int) -> tuple[float, int, int]:
        """Place among all."""
        return (float(seq.request.priority), ticket, seq.index)

    def urgency(self, seq: Sequence) -> float:
        """Urgency in the order of the queue."""
        return float(seq.request.priority)

    def displaced(self, running: GenericSequence[Sequence], head: Sequence, places: int) -> Sequence | None:
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
        """Rank by what its tenant was served."""
        return (self.counter(seq.request.tenant), *seq.order)

    def urgency(self, seq: Sequence) -> float:
        """Urgency by what its tenant was served."""
        return self.counter(seq.request.tenant)

    def served(self, seq: Sequence, count: int) -> None:
        """Count prompts and outputs; what a preemption computes again is not the tenant's fault."""
        prompt = max(0, min(seq.computed, seq.prompt_len) - (seq.computed - count)) if not seq.times.preemptions else 0
        cost = prompt + OUTPUT * (seq.computed >= len(seq.tokens))
        self._counters[seq.request.tenant] = self.counter(seq.request.tenant) + cost / seq.request.weight

    def displaced(self, running: GenericSequence[Sequence], head: Sequence, places: int) -> Sequence | None:
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
