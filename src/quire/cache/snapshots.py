"""What each snapshot of a recurrent state saves, and which one makes room. See docs/design/states.md.

All snapshots have equal bytes, so what one saves is what it saves per byte: the tokens behind the nearest snapshot
before it, which whoever comes back to it would compute again without it, times how many are expected to come back. Age
counts as in GreedyDual (Young 1994): a snapshot is worth what it saves, and what the last one that made room was worth
when it was used last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

PASSED = 0.1
"""Comebacks expected to a snapshot behind which one sequence went on, as where a template drops a part of what was
said; the others are expected behind it. Of 0 to 1 this saves most in `benchmarks/engine/state_snapshots.py`."""
Entry = tuple[float, int, bytes, int]
"""Worth, when it was used last, key, version."""


@dataclass(slots=True)
class ValuedSnapshot:
    """One snapshot after `tokens` tokens, in `slot`; `before`, `behind`: the next ones of its chain, by key.

    `shared`: it is where two prompts parted, the first of which went on before it was stored. `answer`: it lies behind
    an answer, and nobody went on there yet. `passed`: of those behind it, all but such answers.
    """

    slot: int
    tokens: int
    saved: int
    before: bytes | None
    shared: bool
    answer: bool
    passed: int = 0
    behind: set[bytes] = field(default_factory=set)
    base: float = 0.0
    used: int = 0
    version: int = 0

    @property
    def comebacks(self) -> float:
        """How many sequences are expected to begin with it."""
        return max(PASSED, self.passed - 1 + self.shared) if self.passed else 1.0


class SnapshotValues:
    """The snapshots that can be found, by key, and what each is worth."""

    def __init__(self) -> None:
        self._snapshots: dict[bytes, ValuedSnapshot] = {}
        self._key_of: dict[int, bytes] = {}
        self._heap: list[Entry] = []
        self._level, self._uses = 0.0, 0

    def __len__(self) -> int:
        return len(self._snapshots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._snapshots

    def add(self, slot: int, tokens: int, keys: Iterable[bytes], shared: bool = False, answer: bool = False) -> None:
        """A snapshot can be found. `keys`: its own, then those of all places before it on its chain, the last first."""
        key, *rest = keys
        before = next((each for each in rest if each in self._snapshots), None)
        saved = tokens - (self._snapshots[before].tokens if before is not None else 0)
        self._snapshots[key] = ValuedSnapshot(slot, tokens, saved, before, shared, answer)
        self._key_of[slot] = key
        if before is not None:
            last = self._snapshots[before]
            last.behind.add(key)
            last.passed += not answer
            if last.answer and last.before is not None:
                self._snapshots[last.before].passed += 1
                self._queue(last.before)
            last.answer = False
            self._queue(before)
        self.use(slot)

    def use(self, slot: int) -> None:
        """Whoever had `slot` last gave it back; nothing happens where it is no snapshot."""
        key = self._key_of.get(slot)
        if key is not None:
            snapshot = self._snapshots[key]
            self._uses += 1
            snapshot.base, snapshot.used = self._level, self._uses
            self._queue(key)

    def pop_least(self, free: Callable[[int], bool]) -> int:
        """Forget the snapshot that is worth least of those whose slots are `free`, and return its slot."""
        found = self._least(free)
        assert found is not None, "somebody has each of the snapshots"
        worth, _, key, _ = found
        snapshot, self._level = self._snapshots[key], max(self._level, worth)
        self._remove(key, snapshot)
        return snapshot.slot

    def exceeds_least(self, saved: float, free: Callable[[int], bool]) -> bool:
        """Whether a snapshot that saves so many tokens would be worth more than another whose slot is `free`."""
        found = self._least(free)
        return found is not None and self._level + saved > found[0]

    def _least(self, free: Callable[[int], bool]) -> Entry | None:
        """The entry of the snapshot that is worth least of those whose slots are `free`; others are queued again when
        their slots are given back."""
        while self._heap:
            _, _, key, version = entry = self._heap[0]
            snapshot = self._snapshots.get(key)
            if snapshot is not None and snapshot.version == version and free(snapshot.slot):
                return entry
            heappop(self._heap)
        return None

    def worth(self, snapshot: ValuedSnapshot) -> float:
        """What is lost with it."""
        return snapshot.base + snapshot.saved * snapshot.comebacks

    def clear(self) -> None:
        """None can be found any more."""
        self._snapshots.clear()
        self._key_of.clear()
        self._heap.clear()

    def _remove(self, key: bytes, snapshot: ValuedSnapshot) -> None:
        """Remove one; the snapshots behind it then save what it saved, too."""
        del self._snapshots[key], self._key_of[snapshot.slot]
        for each in snapshot.behind:
            later = self._snapshots[each]
            later.before, later.saved = snapshot.before, later.saved + snapshot.saved
            self._queue(each)
        if snapshot.before is not None:
            last = self._snapshots[snapshot.before]
            last.behind.remove(key)
            last.behind |= snapshot.behind
            last.passed += sum(not self._snapshots[each].answer for each in snapshot.behind) - (not snapshot.answer)
            self._queue(snapshot.before)

    def _queue(self, key: bytes) -> None:
        snapshot = self._snapshots[key]
        snapshot.version += 1
        heappush(self._heap, (self.worth(snapshot), snapshot.used, key, snapshot.version))
        if len(self._heap) > 64 + 4 * len(self._snapshots):
            self._heap = [(self.worth(each), each.used, key, each.version) for key, each in self._snapshots.items()]
            heapify(self._heap)
