"""Ownership of KV cache blocks: reference counts and an O(1) free list (PagedAttention, Kwon et al. 2023).
See docs/design/kv-cache.md.

A block is in exactly one state: used (reference count > 0), cached (free, but its content is published under a key and
can be taken back), or free. Cached and free blocks form one list; allocation takes its head, so unpublished blocks are
put at the head and published ones at the tail, which makes eviction least-recently-used.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

SLICE = 1024
"""Blocks that are verified at a time while there is no work: some 0.3 ms, which a request that comes then waits."""
LAST = (1 << 62) - 1
"""Place of a free list's sentinel: behind all blocks of it."""
REMEMBERED = 1 << 15
"""Keys of evicted content that are kept, to explain misses: 6 MB."""


KEY_BYTES = 16
STATE = b"\xff"
"""Stands in keys for the layers that have states; block tables count up from 0."""


def state_key(key: bytes) -> bytes:
    """The key of the recurrent state behind the block of that key."""
    return key + STATE


def is_state(key: bytes) -> bool:
    """Whether the content under `key` is a recurrent state, not a block."""
    return key[KEY_BYTES:] == STATE


class BlockListener(Protocol):
    """Is told what becomes of published content."""

    def published(self, block: int, key: bytes, tokens: tuple[int, ...]) -> None:
        """Note that a block can be found from now on."""
        ...

    def evicted(self, block: int, key: bytes, tokens: tuple[int, ...]) -> None:
        """Note that the block is about to be written anew."""
        ...


class BlockPool:
    """`num_blocks` block ids 0 .. num_blocks - 1. All operations are O(1); `check` is O(num_blocks).

    Block i is of lane i % `lanes` (`Lanes`), a list of free blocks for each; `free` says how many are left.
    """

    def __init__(
        self, num_blocks: int, lanes: int = 1, remembered: int = REMEMBERED, watcher: BlockListener | None = None
    ) -> None:
        """`remembered`: keys of evicted content, 0 where no miss is explained; `watcher` is told what becomes of it."""
        self.num_blocks, self.lanes, self._remembered = num_blocks, lanes, remembered
        self.refs = array("i", bytes(4 * num_blocks))
        self._key: list[bytes | None] = [None] * num_blocks
        self._named = bytearray(num_blocks)  # 1 where there is a key: what can be counted at once
        self._tokens = [b""] * num_blocks  # packed: a tuple of 16 and its numbers take seven times as much
        self._by_key: dict[bytes, int] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        # Free lists are rings threaded through two arrays; index num_blocks + lane is the sentinel that has head and
        # tail. Whatever is in no list is its own neighbour. Places rise along a list, so that a ring beside it, from
        # which no block would ever be taken, shows in one look at each block and its neighbours.
        self._next = array("i", range(num_blocks + lanes))
        self._prev = array("i", range(num_blocks + lanes))
        self._place = array("q", [LAST]) * (num_blocks + lanes)
        self._first = self._last = 0
        self.free = [0] * lanes
        self.watcher = watcher
        self._checked = 0
        for block in range(num_blocks):
            self._link(block, at_head=False)

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return sum(self.free)

    def fits(self, need: Iterable[int], spare: int = 0) -> bool:
        """Whether each lane has as many blocks free as `need` says, and `spare` more."""
        return all(wanted + spare <= free for wanted, free in zip(need, self.free, strict=True))

    @property
    def num_used(self) -> int:
        """Blocks with an owner."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks whose content is published, used or not."""
        return len(self._by_key)

    def allocate(self, lane: int = 0) -> int:
        """Take the head of a free list, evicting its content if it was published. IndexError when none is left."""
        block = self._next[self.num_blocks + lane]
        if block >= self.num_blocks:
            raise IndexError("no free block")
        self._unlink(block)
        self._give_up(block)
        self.refs[block] = 1
        return block

    def would_evict(self, lane: int = 0) -> bool:
        """Whether the next allocation evicts published content."""
        block = self._next[self.num_blocks + lane]
        return block < self.num_blocks and self._key[block] is not None

    def evict(self, block: int) -> None:
        """Evict the content of a cached block, which the next allocation takes: what makes room is chosen elsewhere."""
        if self.refs[block]:
            raise ValueError(f"block {block} has an owner, who may read its content")
        self._give_up(block)
        self._unlink(block)
        self._link(block, at_head=True)

    def acquire(self, block: int) -> None:
        """Add an owner; a cached block leaves the free list."""
        if self.refs[block] == 0:
            self._unlink(block)
        self.refs[block] += 1

    def release(self, block: int) -> None:
        """Drop an owner; the last one returns the block to the free list."""
        if self.refs[block] <= 0:
            raise ValueError(f"block {block} has no owner to release it")
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self._link(block, at_head=self._key[block] is None)

    def writable(self, block: int) -> bool:
        """Whether its single owner may write into it; a shared or published block must be copied first."""
        return self.refs[block] == 1 and self._key[block] is None

    def publish(self, block: int, key: bytes, tokens: Seq[int]) -> bool:
        """Make a used block findable under `key`; False when that content is published already by another block."""
        if key in self._by_key or self._key[block] is not None:
            return False
        self._key[block], self._tokens[block], self._named[block] = key, _packed(tokens), 1
        self._by_key[key] = block
        if self.watcher is not None:
            self.watcher.published(block, key, tuple(tokens))
        return True

    def find(self, key: bytes, tokens: Seq[int]) -> int | None:
        """The block published under `key` if it holds exactly `tokens` (a hash match alone is not trusted)."""
        block = self._by_key.get(key)
        return block if block is not None and self._tokens[block] == _packed(tokens) else None

    def tokens(self, block: int) -> tuple[int, ...]:
        """What a published block holds."""
        return _unpacked(self._tokens[block])

    def published(self, key: bytes) -> bool:
        """Whether some block is published under `key`."""
        return key in self._by_key

    def was_evicted(self, key: bytes) -> bool:
        """Whether a block was published under `key` lately, and had to make room."""
        return key in self._evicted

    def forget_all(self) -> None:
        """Make no content findable any more. Owners keep their blocks, and still copy shared ones before a write; the
        watcher is not told."""
        for block in list(self._by_key.values()):
            self._evict(block)

    def check(self) -> None:
        """Verify all of the account; AssertionError names the first violation."""
        self.check_counts()
        self.check_blocks(0, self.num_blocks)

    def check_counts(self) -> None:
        """Verify free + used = total, both ends of free lists, and that there are as many keys as entries."""
        owned = np.frombuffer(self.refs, np.intc) != 0
        for lane, said in enumerate(self.free):
            found, end = int(np.count_nonzero(~owned[lane :: self.lanes])), self.num_blocks + lane
            assert found == said, f"free list {lane}: {found} blocks have no owner, its count says {said}"
            ends = self._next[end], self._prev[end]
            assert min(ends) >= 0 and max(ends) < len(self._next), f"broken link at the end of free list {lane}"
            whole = self._prev[ends[0]] == end == self._next[ends[1]]
            assert whole, f"broken link at the end of free list {lane}"
        named = int(np.count_nonzero(np.frombuffer(self._named, np.bool_)))
        assert named == len(self._by_key), f"{named} blocks have a key, the key table has {len(self._by_key)}"

    def check_blocks(self, start: int, end: int) -> None:
        """Verify blocks `start` .. `end` - 1: beside `check_counts`, all that must hold is said of each block alone.

        One without an owner is in the free list of its lane, others are in none. A list whose links are symmetric is
        a ring, and as places rise along it to the sentinel alone, there is no ring beside it. With as many entries as
        keys, a key table that knows the key of each block knows no others.
        """
        owners = np.frombuffer(self.refs, np.intc)[start:end]
        nexts, prevs = np.frombuffer(self._next, np.intc), np.frombuffer(self._prev, np.intc)
        places, blocks = np.frombuffer(self._place, np.int64), np.arange(start, end)
        after, before = nexts[start:end], prevs[start:end]

        def every(holds: NDArray[np.bool_], says: Callable[[int], str]) -> None:
            if not holds.all():
                raise AssertionError(says(int(np.argmin(holds))))

        used, within = owners > 0, (np.minimum(after, before) >= 0) & (np.maximum(after, before) < len(nexts))
        every(owners >= 0, lambda at: f"block {start + at} has {owners[at]} owners")
        every(within, lambda at: f"broken link at block {start + at}")
        symmetric = (prevs[after] == blocks) & (nexts[before] == blocks)
        every(symmetric, lambda at: f"broken link at block {start + at}")
        linked = after != blocks
        every(~(linked & used), lambda at: f"block {start + at} is free but has {owners[at]} owners")
        every(linked | used, lambda at: f"block {start + at} has no owner and is in no free list")
        rising = (places[after] > places[start:end]) | used
        every(rising, lambda at: f"block {start + at} is in a ring of free blocks beside the free list")
        lane = np.where(after < self.num_blocks, after % self.lanes, after - self.num_blocks)
        every(
            (lane == blocks % self.lanes) | used,
            lambda at: f"block {start + at} is in the free list of lane {lane[at]}",
        )
        for block in range(start, end):
            key = self._key[block]
            assert self._named[block] == (key is not None), (
                f"block {block}: its key is not counted, or counts and is none"
            )
            assert key is None or self._by_key.get(key) == block, f"key table disagrees about block {block}"

    def check_more(self) -> bool:
        """Verify the counts, and the next `SLICE` blocks of all in turn; whether there are more up to the last."""
        self.check_counts()
        end = min(self._checked + SLICE, self.num_blocks)
        self.check_blocks(self._checked, end)
        self._checked = end % self.num_blocks
        return self._checked > 0

    def _give_up(self, block: int) -> None:
        """Evict what is published of it, once the watcher was told."""
        key = self._key[block]
        if key is not None and self.watcher is not None:
            self.watcher.evicted(block, key, self.tokens(block))
        self._evict(block)

    def _evict(self, block: int) -> None:
        key = self._key[block]
        if key is not None:
            del self._by_key[key]
            self._evicted[key] = None
            if len(self._evicted) > self._remembered:
                self._evicted.popitem(last=False)
            self._key[block], self._tokens[block], self._named[block] = None, b"", 0

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self._next[block] = self._prev[block] = block
        self.free[block % self.lanes] -= 1

    def _link(self, block: int, at_head: bool) -> None:
        lane = block % self.lanes
        end = self.num_blocks + lane
        before = end if at_head else self._prev[end]
        after = self._next[end] if at_head else end
        self._next[before], self._prev[block] = block, before
        self._next[block], self._prev[after] = after, block
        if at_head:
            self._first -= 1
            self._place[block] = self._first
        else:
            self._last += 1
            self._place[block] = self._last
        self.free[lane] += 1


def _packed(tokens: Seq[int]) -> bytes:
    return array("q", tokens).tobytes()


def _unpacked(tokens: bytes) -> tuple[int, ...]:
    found = array("q")
    found.frombytes(tokens)
    return tuple(found)
