"""Blocks that go from replicas that compute prompts to those that go on with them: a store without bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass
from typing import Any

from quire.cache.tiers import StoreCounts, StoreKey, StoreRead, StoreSizes, Tiers

Later = Callable[[int, float, Callable[[], None]], None]
"""Calls something after so many seconds, and wakes the replica of that number."""


@dataclass(frozen=True)
class SimulatedLink:
    """Blocks and states of `sizes` are read at `bytes_per_s`, `latency` seconds after they were asked for.

    `capacity`: how many of them the store remembers. They are written while prompts are computed, which is free here.
    """

    sizes: StoreSizes
    bytes_per_s: float
    latency: float = 0.0
    capacity: int = 1 << 20


class SimulatedStore:
    """Which blocks were written, least recently used first; `quire.cache.tiers.Store` without content."""

    def __init__(self, link: SimulatedLink, clock: Callable[[], float], later: Later) -> None:
        self.link, self._clock, self._later = link, clock, later
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._free: dict[int, float] = {}
        self.read_blocks = 0

    def tiers(self, replica: int) -> Tiers:
        """What is behind the pool of one replica."""
        return _Through(self, replica)

    @property
    def counts(self) -> StoreCounts:
        """Blocks that it has."""
        return StoreCounts(blocks=len(self._keys), bytes=sum(map(self.link.sizes.of, self._keys)))

    def has(self, key: bytes) -> bool:
        """Whether it was written, and not forgotten."""
        return key in self._keys

    def put(self, key: bytes, tokens: tuple[int, ...], data: Any) -> None:
        """Note that a block is written."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self.link.capacity:
            self._keys.popitem(last=False)

    def full(self) -> bool:
        """Never."""
        return False

    def shared(self, key: bytes) -> bool:
        """Everybody finds what there is."""
        return self.has(key)

    def read(self, wanted: GenericSequence[StoreKey]) -> dict[bytes, Any]:
        """Read the blocks up to the first that is not there."""
        found: dict[bytes, Any] = {}
        for want in wanted:
            if want.key not in self._keys:
                break
            found[want.key] = b""
        self.read_blocks += len(found)
        return found

    def forget_all(self) -> None:
        """Hold nothing any more."""
        self._keys.clear()

    def settle(self) -> None:
        """Nothing is being done."""

    def close(self, seconds: float) -> None:
        """Nothing is left to do."""

    def begin(self, replica: int, reading: StoreRead) -> None:
        """Read after what the replica reads already."""
        now = self._clock()
        start = max(now, self._free.get(replica, 0.0))
        end = start + self.link.latency + self.link.sizes.total(reading.wanted) / self.link.bytes_per_s
        self._free[replica] = end

        def done() -> None:
            reading.found, reading.seconds = self.read(reading.wanted), end - now
            reading.done.set()

        self._later(replica, end - now, done)


class _Through(Tiers):
    """Every published block is written, none is kept when it is evicted, and readings end when the clock says so."""

    def __init__(self, store: SimulatedStore, replica: int) -> None:
        super().__init__(store, store.link.sizes)
        self._to, self._replica = store, replica

    def published(self, block: int, key: bytes, tokens: tuple[int, ...]) -> None:
        """Others may read it from now on."""
        self._to.put(key, tokens, b"")

    def evicted(self, block: int, key: bytes, tokens: tuple[int, ...]) -> None:
        """Do nothing: a block was written when it was published."""

    def read(self, wanted: GenericSequence[StoreKey]) -> StoreRead:
        """Begin to read a piece."""
        reading = StoreRead(wanted)
        self._to.begin(self._replica, reading)
        return reading
