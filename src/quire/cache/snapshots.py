"""What each snapshot of a recurrent state saves, and which one makes room. See docs/design/states.md.

All snapshots have equal bytes, so what one saves is what it saves per byte: the tokens behind the nearest snapshot
before it, which whoever comes back to it would compute again without it, times how many are expected to come back. What
was used long ago counts less: half for each `HALF_LIFE` uses of as many snapshots as there are, as frequencies do in
LRFU (Lee et al. 2001).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

PASSED = 0.01
"""Comebacks expected to a snapshot behind which one sequence went on."""
HALF_LIFE = 8
"""How often snapshots are used, on average, until one that is not counts half. Of both numbers these save most in
`benchmarks/engine/state_snapshots.py`."""
RECENT = 0.98
"""What each of those who came back counts beside the next, where it is counted who kept the answer."""
Entry = tuple[float, int, bytes, int]
"""Worth, when it was used last, key, version."""


@dataclass(slots=True)
class ValuedSnapshot:
    """One snapshot after `tokens` tokens, in `slot`; `before`, `behind`: the next ones of its chain, by key.

    `shared`: it is where two prompts parted, the first of which went on before it was stored. `answer`: it lies in an
    answer, and no prompt went on behind it yet. `passed`: of those behind it, all but such answers. `comebacks`: how
    many sequences are expected to begin with it.
    """

    slot: int
    tokens: int
    saved: int
    before: bytes | None
    shared: bool
    answer: bool
    passed: int = 0
    behind: set[bytes] = field(default_factory=set)
    comebacks: float = 1.0
    base: float = 0.0
    used: int = 0
    version: int = 0


class SnapshotValues:
    """The snapshots that can be found, by key, and what each is worth.

    Whoever goes on with a conversation keeps the answer, or its template drops a part of it: `_kept` and `_left` count
    both.
    """

    def __init__(self) -> None:
        self._snapshots: dict[bytes, ValuedSnapshot] = {}
        self._key_of: dict[int, bytes] = {}
        self._heap: list[Entry] = []
        self._age, self._uses = 0.0, 0
        self._kept = self._left = 1.0

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
            if not answer:
                self._goes_on(before)
            self._snapshots[before].behind.add(key)
            self._queue(before)
        self.use(slot)

    def _goes_on(self, key: bytes) -> None:
        """A prompt has a snapshot behind that of `key`, which it came back to or passed."""
        last = self._snapshots[key]
        if last.answer or (last.behind and not last.passed):
            self._kept, self._left = RECENT * self._kept + last.answer, RECENT * self._left + (not last.answer)
        last.passed += 1
        while last.answer and last.before is not None:
            last.answer = False
            last = self._snapshots[key := last.before]
            last.passed += 1
            self._queue(key)
        last.answer = False

    def _comebacks(self, snapshot: ValuedSnapshot) -> float:
        if snapshot.passed:
            return max(PASSED, snapshot.passed - 1 + snapshot.shared)
        if snapshot.answer:
            return PASSED if snapshot.behind else self._keeps
        return 1 - self._keeps if snapshot.behind else 1.0

    @property
    def _keeps(self) -> float:
        """The share of those who came back lately that kept the answer."""
        return self._kept / (self._kept + self._left)

    def use(self, slot: int) -> None:
        """Whoever had `slot` last gave it back; nothing happens where it is no snapshot."""
        key = self._key_of.get(slot)
        if key is not None:
            snapshot = self._snapshots[key]
            self._uses += 1
            self._age += 1 / (HALF_LIFE * len(self._snapshots))
            snapshot.base, snapshot.used = self._age, self._uses
            self._queue(key)

    def pop_least(self, free: Callable[[int], bool]) -> int:
        """Forget the snapshot that is worth least of those whose slots are `free`, and return its slot."""
        found = self._least(free)
        assert found is not None, "somebody has each of the snapshots"
        key = found[2]
        snapshot = self._snapshots[key]
        self._remove(key, snapshot)
        return snapshot.slot

    def exceeds_least(self, saved: int, free: Callable[[int], bool]) -> bool:
        """Whether a snapshot that saves `saved` tokens of an answer would be worth more than another whose slot is
        `free`."""
        found = self._least(free)
        return found is not None and self._age + math.log2(saved * self._keeps) > found[0]

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
        """What is lost with it, as a logarithm."""
        return snapshot.base + math.log2(snapshot.saved * snapshot.comebacks)

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
        snapshot.comebacks = self._comebacks(snapshot)
        heappush(self._heap, (self.worth(snapshot), snapshot.used, key, snapshot.version))
        if len(self._heap) > 64 + 4 * len(self._snapshots):
            self._heap = [(self.worth(each), each.used, key, each.version) for key, each in self._snapshots.items()]
            heapify(self._heap)
