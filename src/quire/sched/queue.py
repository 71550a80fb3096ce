"""The waiting line, sorted by policy: whoever comes, goes or is the next costs the same however many wait."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from quire.core.sequence import Sequence

Rank = tuple[float, ...]
LEFT_BEHIND = 64
"""Dead entries that a heap may have beside as many as live ones: small heaps are not made anew all the time."""


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
        """Some of those that wait, as iteration would give them."""
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
        """Some of those that wait, as iteration would give them."""
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
        """Its key is new, or may have fallen."""
        key = self._key(name)
        if name not in self._listed or key < self._listed[name]:
            self._listed[name] = key
            heapq.heappush(self._heap, (key, name))

    def drop(self, name: str) -> None:
        """It has no key any more."""
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
        """Some of those that wait, as iteration would give them."""
        return sorted(seqs, key=lambda seq: (self._numbers[seq.request.tenant], seq.order))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for line in list(self._lines.values()):
            yield from line

    def _rank(self, tenant: str) -> Rank:
        return (self._counter(tenant), *self._lines[tenant].head().order)
