"""A store in host memory, for a cache that is a GPU's: what has no room any more goes to the store below."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence as GenericSequence
from typing import Any

from quire.cache.tiers import Store, StoreCounts, StoreKey, StoreSizes


class HostStore:
    """The last blocks and states of `sizes` that were put or read, of `most` bytes in all, and one at least."""

    def __init__(self, most: int, sizes: StoreSizes, below: Store | None = None) -> None:
        self._most, self._sizes, self._below = most, sizes, below
        self._blocks: OrderedDict[bytes, tuple[tuple[int, ...], Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes = self._written = 0

    @property
    def counts(self) -> StoreCounts:
        """Counts of all tiers together."""
        below = StoreCounts() if self._below is None else self._below.counts
        return below._replace(
            blocks=below.blocks + len(self._blocks),
            bytes=below.bytes + self._bytes,
            written=below.written + self._written,
        )

    def has(self, key: bytes) -> bool:
        """Whether this store or one below has it."""
        return key in self._blocks or (self._below is not None and self._below.has(key))

    def shared(self, key: bytes) -> bool:
        """Whether the store below has it: what is here is this process's."""
        return self._below is not None and self._below.shared(key)

    def full(self) -> bool:
        """Never: what was put first leaves."""
        return False

    def put(self, key: bytes, tokens: tuple[int, ...], data: Any) -> None:
        """Keep it at once."""
        leaving = list[tuple[bytes, tuple[tuple[int, ...], Any]]]()
        with self._lock:
            self._bytes += 0 if key in self._blocks else self._sizes.of(key)
            self._blocks[key] = tokens, data
            self._written += 1
            while self._bytes > self._most and len(self._blocks) > 1:
                leaving.append(self._blocks.popitem(last=False))
                self._bytes -= self._sizes.of(leaving[-1][0])
        for left, held in leaving:
            if self._below is not None and not self._below.has(left):
                self._below.put(left, *held)

    def read(self, wanted: GenericSequence[StoreKey]) -> dict[bytes, Any]:
        """The blocks up to the first that no tier has."""
        mine: dict[bytes, Any] = {}
        with self._lock:
            for want in reversed(wanted):  # the beginning of a chain is to stay longest
                if (held := self._blocks.get(want.key)) is not None and held[0] == want.tokens:
                    mine[want.key] = held[1]
                    self._blocks.move_to_end(want.key)
        others = [want for want in wanted if want.key not in mine]
        if others and self._below is not None:
            mine |= self._below.read(others)
        found: dict[bytes, Any] = {}
        for want in wanted:
            if want.key not in mine:
                break
            found[want.key] = mine[want.key]
        return found

    def forget_all(self) -> None:
        """Hold nothing, here and below."""
        with self._lock:
            self._blocks.clear()
            self._bytes = 0
        if self._below is not None:
            self._below.forget_all()

    def settle(self) -> None:
        """Do nothing: a host store is never full."""

    def close(self, seconds: float) -> None:
        """What is here goes below, as far as it is taken: the least recently used last."""
        if self._below is None:
            return
        for key, (tokens, data) in reversed(list(self._blocks.items())):
            if not self._below.full() and not self._below.has(key):
                self._below.put(key, tokens, data)
        self._below.close(seconds)
