"""Ownership of KV cache blocks: reference counts and an O(1) free list (PagedAttention, Kwon et al. 2023).

A block is in exactly one state: used (reference count > 0), cached (free, but its content is published under a key and
can be taken back), or free. Cached and free blocks form one list; allocation takes its head, so unpublished blocks are
put at the head and published ones at the tail, which makes eviction least-recently-used.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

_NONE = -1
REMEMBERED = 1 << 15
"""Keys of evicted content that are kept, to explain misses: 6 MB."""


class Watcher(Protocol):
    """Is told what becomes of published content."""

    def published(self, block: int, key: bytes, tokens: tuple[int, ...]) -> None:
        """It can be found from now on."""
        ...

    def evicted(self, block: int, key: bytes, tokens: tuple[int, ...]) -> None:
        """Its block is about to be written anew."""
        ...

    def forgotten(self) -> None:
        """None can be found any more."""
        ...


class BlockPool:
    """`num_blocks` block ids 0 .. num_blocks - 1. All operations are O(1); `check` is O(num_blocks).

    Block i is of lane i % `lanes` (cache/lanes.py), a list of free blocks for each; `free` says how many are left.
    """

    def __init__(self, num_blocks: int, lanes: int = 1, remembered: int = REMEMBERED) -> None:
        """`remembered`: keys of evicted content, 0 where no miss is explained."""
        self.num_blocks, self.lanes, self._remembered = num_blocks, lanes, remembered
        self.refs = [0] * num_blocks
        self._key: list[bytes | None] = [None] * num_blocks
        self._tokens = [b""] * num_blocks  # packed: a tuple of 16 and its numbers take seven times as much
        self._by_key: dict[bytes, int] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        # Free lists are threaded through two arrays; index num_blocks + lane is the sentinel that holds head and tail.
        self._next = array("q", [_NONE]) * (num_blocks + lanes)
        self._prev = array("q", [_NONE]) * (num_blocks + lanes)
        self.free = [0] * lanes
        self.watcher: Watcher | None = None
        for lane in range(lanes):
            self._next[num_blocks + lane] = self._prev[num_blocks + lane] = num_blocks + lane
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
        key = self._key[block]
        if key is not None and self.watcher is not None:
            self.watcher.evicted(block, key, self.tokens(block))
        self._forget(block)
        self.refs[block] = 1
        return block

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
        self._key[block], self._tokens[block] = key, _packed(tokens)
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

    def evicted(self, key: bytes) -> bool:
        """Whether a block was, lately, and had to make room."""
        return key in self._evicted

    def forget_all(self) -> None:
        """Make no content findable any more. Owners keep their blocks, and still copy shared ones before a write."""
        for block in list(self._by_key.values()):
            self._forget(block)
        if self.watcher is not None:
            self.watcher.forgotten()

    def check(self) -> None:
        """Verify free + used = total, link symmetry and the key table; AssertionError names the first violation."""
        seen = set[int]()
        for lane, free in enumerate(self.free):
            at, before = self._next[self.num_blocks + lane], len(seen)
            while at < self.num_blocks:
                assert self.refs[at] == 0, f"block {at} is free but has {self.refs[at]} owners"
                assert self._prev[self._next[at]] == at, f"broken link at block {at}"
                assert at not in seen, f"block {at} is twice in the free list"
                assert at % self.lanes == lane, f"block {at} is in the free list of lane {lane}"
                seen.add(at)
                at = self._next[at]
            assert len(seen) - before == free, f"free list has {len(seen) - before} blocks, count says {free}"
        used = sum(r > 0 for r in self.refs)
        assert used + len(seen) == self.num_blocks, f"{used} used + {len(seen)} free != {self.num_blocks}"
        for key, block in self._by_key.items():
            assert self._key[block] == key, f"key table disagrees about block {block}"
        assert sum(k is not None for k in self._key) == len(self._by_key), "a key without an entry"

    def _forget(self, block: int) -> None:
        key = self._key[block]
        if key is not None:
            del self._by_key[key]
            self._evicted[key] = None
            if len(self._evicted) > self._remembered:
                self._evicted.popitem(last=False)
            self._key[block], self._tokens[block] = None, b""

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self._next[block] = self._prev[block] = _NONE
        self.free[block % self.lanes] -= 1

    def _link(self, block: int, at_head: bool) -> None:
        lane = block % self.lanes
        end = self.num_blocks + lane
        before = end if at_head else self._prev[end]
        after = self._next[end] if at_head else end
        self._next[before], self._prev[block] = block, before
        self._next[block], self._prev[after] = after, block
        self.free[lane] += 1


def _packed(tokens: Seq[int]) -> bytes:
    return array("q", tokens).tobytes()


def _unpacked(tokens: bytes) -> tuple[int, ...]:
    found = array("q")
    found.frombytes(tokens)
    return tuple(found)
