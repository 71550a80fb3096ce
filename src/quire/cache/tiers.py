"""Tiers behind the KV cache: what was evicted is kept in a store, and comes back by the same hash.
See docs/design/kv-store.md.

A store may be slower than computing the tokens again. Which it is, is measured: seconds to read a block, seconds to
compute a token (as in Mooncake, Qin et al. 2024, and CachedAttention, Gao et al. 2024).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from collections.abc import Sequence as GenericSequence
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from quire.cache.blocks import is_state
from quire.core.plan import Fill, Save

log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""Read and put into the cache at one time: others' steps wait for the copy, 20 ms."""
PIECES = 4
"""That are read and not yet put into the cache."""
MEASURED_ROWS = 32
"""Rows of prompts in a step that says how long a token takes: below, weights are most of its time."""
PATIENCE = 8
"""How often computing is chosen before reading is tried again; twice as often after each try that was slower."""
MOST_PATIENCE = 1024
FOLLOW = 0.3


class StoreKey(NamedTuple):
    """What a store has: the key of a block of tokens for a group of layers, or of the recurrent state behind it."""

    key: bytes
    tokens: tuple[int, ...]


class StoreSizes(NamedTuple):
    """Bytes of a block, and of the recurrent states of a sequence."""

    block: int
    state: int = 0

    def of(self, key: bytes) -> int:
        """Bytes of what is kept under `key`."""
        return self.state if is_state(key) else self.block

    def total(self, keys: Iterable[StoreKey]) -> int:
        """Bytes of all `keys`."""
        return sum(self.of(each.key) for each in keys)


class StoreCounts(NamedTuple):
    """Counts of a store now: blocks and bytes it holds; since the start: blocks written, found bad, not taken for want
    of time or room."""

    blocks: int = 0
    bytes: int = 0
    written: int = 0
    bad: int = 0
    dropped: int = 0


class Store(Protocol):
    """Keeps the content of blocks, and recurrent states, by key. One thread calls all but `read`, which another may
    call meanwhile."""

    @property
    def counts(self) -> StoreCounts:
        """What the store holds and did."""
        ...

    def has(self, key: bytes) -> bool:
        """Whether it is likely to have the block; `read` says for sure."""
        ...

    def put(self, key: bytes, tokens: tuple[int, ...], data: Any) -> None:
        """Keep `data`, which nobody changes any more; never waits, and may decline."""
        ...

    def full(self) -> bool:
        """Whether `put` would decline for want of time."""
        ...

    def shared(self, key: bytes) -> bool:
        """Whether other processes find the block."""
        ...

    def read(self, wanted: GenericSequence[StoreKey]) -> dict[bytes, Any]:
        """The blocks up to the first that is not there, damaged or of other tokens."""
        ...

    def forget_all(self) -> None:
        """Hold nothing any more."""
        ...

    def settle(self) -> None:
        """Do something about being full, in this thread."""
        ...

    def close(self, seconds: float) -> None:
        """Finish what was put, for so long at most."""
        ...


class StoreRates:
    """Seconds that a byte takes to be read and a token to be computed, as they were lately."""

    def __init__(self) -> None:
        self.byte = self.token = 0.0
        self._declined, self._patience = 0, PATIENCE

    def pays(self, nbytes: int, tokens: int) -> bool:
        """Whether reading `nbytes` is expected to be faster than computing their `tokens`, or is to be tried again."""
        if not self.byte or not self.token or nbytes * self.byte < tokens * self.token:
            self._declined, self._patience = 0, PATIENCE
            return True
        self._declined += 1
        if self._declined < self._patience:
            return False
        self._declined, self._patience = 0, min(MOST_PATIENCE, 2 * self._patience)
        return True

    def read(self, nbytes: int, seconds: float) -> None:
        """Note that so many bytes were read and put in place."""
        self.byte = _toward(self.byte, seconds / nbytes)

    def computed(self, prompts: int, rows: int, seconds: float) -> None:
        """A step of `rows` rows, `prompts` of which were of prompts, took so long."""
        if prompts >= MEASURED_ROWS:
            self.token = _toward(self.token, seconds / rows)


def _toward(known: float, found: float) -> float:
    return found if not known else known + FOLLOW * (found - known)


class StoreRead:
    """Blocks and states that a thread reads from a store; `found` is there once it is `done`."""

    def __init__(self, wanted: GenericSequence[StoreKey]) -> None:
        self.wanted = wanted
        self.found: dict[bytes, Any] = {}
        self.seconds = 0.0
        self.done = threading.Event()
        self.dropped = False


class Tiers:
    """Between the pools and a store: notes what is to be kept of evicted blocks, and of slots of recurrent states, and
    reads what is wanted back.

    `saves` and `fills` gather what the next plan says; a plan is prepared before its rows are computed. `through`: so
    many bytes that can be found are kept in each plan, as others wait for them; 0: only what is evicted is.
    """

    def __init__(self, store: Store, sizes: StoreSizes, through: int = 0) -> None:
        self.store, self.sizes, self._through = store, sizes, through
        self.rates = StoreRates()
        self.piece = max(1, PIECE_BYTES // sizes.block)
        self.hits = self.misses = self.dropped = 0
        self.saves: list[Save] = []
        self.fills: list[Fill] = []
        self._unsaved: dict[bytes, Save] = {}
        self._asked: SimpleQueue[StoreRead | None] = SimpleQueue()
        self._room = threading.Semaphore(PIECES)
        self._returned, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------------- to the store

    def published(self, block: int, key: bytes, tokens: tuple[int, ...]) -> None:
        """A block or a state can be found from now on."""
        self._unsaved[key] = Save(block, key, tokens, is_state(key))

    def evicted(self, block: int, key: bytes, tokens: tuple[int, ...]) -> None:
        """A block or a slot is about to be written anew: what it holds is copied before. One that is yet to be filled
        holds nothing, and came from the store."""
        self._unsaved.pop(key, None)
        state = is_state(key)
        if any((fill.block, fill.state) == (block, state) for fill in self.fills) or self.store.has(key):
            return
        if self.store.full():
            self.dropped += 1
        else:
            self.saves.append(Save(block, key, tokens, state))

    def forget_all(self) -> None:
        """Nothing of the pools can be found any more, nor of the store."""
        self._unsaved.clear()
        self.saves.clear()
        self.store.forget_all()

    def behind(self, most: int) -> tuple[Save, ...]:
        """Blocks and states of some `most` bytes that can be found and are in no store, the oldest first: whatever
        keeps the rest from being written, the beginnings of chains are there, without which their ends are worth
        nothing. One at least, if there is any."""
        found: list[Save] = []
        left = most
        while self._unsaved and left > 0 and not self.store.full():
            save = self._unsaved.pop(next(iter(self._unsaved)))
            if not self.store.has(save.key):
                found.append(save)
                left -= self.sizes.of(save.key)
        return tuple(found)

    @property
    def unsaved(self) -> int:
        """Blocks and states that `behind` has still to look at."""
        return len(self._unsaved)

    def take(self) -> tuple[tuple[Save, ...], tuple[Fill, ...]]:
        """What the next plan says."""
        if self._through:
            self.saves += self.behind(self._through)
        (saves, self.saves), (fills, self.fills) = (tuple(self.saves), []), (tuple(self.fills), [])
        return saves, fills

    # ----------------------------------------------------------------------------------------------- from the store

    def read(self, wanted: GenericSequence[StoreKey]) -> StoreRead:
        """Begin to read a piece."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="quire-kv-read", daemon=True)
            self._thread.start()
        reading = StoreRead(wanted)
        self._asked.put(reading)
        return reading

    def fill(self, block: int, key: bytes, data: Any) -> None:
        """The next plan puts what was read under `key` into a block, or into a slot."""
        self._unsaved.pop(key, None)
        self.fills.append(Fill(block, data, is_state(key)))

    def ended(self, reading: StoreRead) -> None:
        """Note that what a read found was used."""
        self._room.release()
        self.hits += len(reading.found)
        self.misses += len(reading.wanted) - len(reading.found)
        if reading.found:
            self.rates.read(sum(map(self.sizes.of, reading.found)), reading.seconds)

    def drop(self, reading: StoreRead) -> None:
        """Nobody wants it any more."""
        with self._lock:
            reading.dropped = True
            if reading.done.is_set():
                self._room.release()

    def wait(self, seconds: float) -> None:
        """Until something was read, for so long at most."""
        self._returned.wait(seconds)
        self._returned.clear()

    def close(self, seconds: float) -> None:
        """Finish what is being written."""
        self._asked.put(None)
        self.store.close(seconds)

    def _run(self) -> None:
        while (reading := self._asked.get()) is not None:
            if reading.dropped:
                continue
            self._room.acquire()
            begin = time.perf_counter()
            try:
                reading.found = self.store.read(reading.wanted)
            except Exception:  # whoever waits computes instead
                log.exception("a store of keys and values failed")
            with self._lock:
                reading.seconds = time.perf_counter() - begin
                reading.done.set()
                if reading.dropped:
                    self._room.release()
            self._returned.set()
