"""The waiting line, always sorted by policy."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from quire.core.sequence import Sequence


class WaitingQueue:
    """Sequences sorted by `Sequence.order`; O(log n) search and a short memmove per change."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def push(self, seq: Sequence) -> None:
        """Insert at the place its order gives."""
        bisect.insort(self._items, seq, key=lambda s: s.order)

    def head(self) -> Sequence:
        """The next to be admitted."""
        return self._items[0]

    def pop(self) -> Sequence:
        """Remove and return the head."""
        return self._items.pop(0)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that is known to wait."""
        self._items.remove(seq)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)
