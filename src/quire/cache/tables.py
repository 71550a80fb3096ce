"""The block tables of each sequence, one per group of layers: grown, shared, copied on write, slid, released."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as GenericSequence
from typing import Any

from quire.cache.blocks import BlockPool
from quire.cache.groups import TableSizes
from quire.cache.prefix import PrefixCache, Stored
from quire.cache.states import StateSlots
from quire.cache.tiers import StoreKey, Tiers
from quire.core.plan import NO_STATE, StateStep
from quire.core.sequence import SLID_OUT, STORED, Sequence, Status
from quire.core.windows import first_seen


class BlockTables:
    """The one writer of `Sequence.kv`, and of `computed` downwards.

    A sequence has a table per group of layers, all of one length, or none while it holds nothing. Blocks that slid out
    of a group's window are freed; their table entry becomes SLID_OUT and is never read again.

    `slides`: whether any do; `loses`: whether such may not be published yet, which later requests would have found.
    `states`: slots of recurrent states, where the model has any.
    """

    def __init__(
        self,
        pool: BlockPool,
        prefix: PrefixCache | None,
        sizes: TableSizes,
        tiers: Tiers | None = None,
        states: StateSlots | None = None,
    ) -> None:
        """`tiers`: what is behind the pool and the slots of states, whose watcher it is."""
        watchers = {pool.watcher} if states is None else {pool.watcher, states.pool.watcher}
        assert watchers == {tiers}, "what is behind a pool is told what becomes of its content"
        self.pool, self.tiers = pool, tiers
        self.prefix, self.states = prefix, states
        self.sizes = sizes
        self.block_size, self.lanes = sizes.block_size, sizes.lanes
        self.slides = any(sizes.windows)
        self.loses = (self.slides or states is not None) and prefix is not None

    def missing(self, seq: Sequence, upto: int) -> list[int]:
        """How many blocks of each lane must be allocated so that positions computed .. upto - 1 may be written."""
        if len(self.sizes.windows) == 1:
            return self._missing(seq, 0, upto)
        return added(self._missing(seq, group, upto) for group in range(len(self.sizes.windows)))

    def fit(self, counts: Mapping[Sequence, int]) -> bool:
        """Whether there are blocks for the next so many positions of each."""
        needs = [self.missing(seq, seq.computed + count) for seq, count in counts.items() if count]
        if self.states is not None and not self.states.fit(seq for seq, count in counts.items() if count):
            return False
        return not needs or self.pool.fits(added(needs))

    def lacking(self, seq: Sequence) -> list[int]:
        """How many of each lane `seq` still needs up to its target, those given back on the way not counted twice."""
        need = []
        for group, window in enumerate(self.sizes.windows):
            slid = seq.kv.slid[group] if seq.kv.blocks else 0
            most = (slid + self.sizes.most(seq.target, window)) * self.block_size
            need.append(self._missing(seq, group, min(seq.target, most)))
        return added(need)

    def reserve(self, seq: Sequence, upto: int, copies: list[tuple[int, int]]) -> bool:
        """Make positions computed .. upto - 1 writable: copy shared or published blocks, append new; and the next
        state, where there are any. All or nothing."""
        if self.states is not None and not self.states.reserve(seq):
            return False
        if self._writable(seq, upto):
            return True
        if not self.pool.fits(self.missing(seq, upto)):
            return False
        if not seq.kv.blocks:
            self._open(seq)
            if prefix := self._prefix_for(seq):
                prefix.count(seq, 0, self.sizes.windows)
        for table in seq.kv.blocks:
            for i in range(seq.computed // self.block_size, self.sizes.entries(upto)):
                if i == len(table):
                    table.append(self.pool.allocate(self.lanes.of(i)))
                elif not self.pool.writable(table[i]):
                    fresh = self.pool.allocate(self.lanes.of(i))
                    copies.append((table[i], fresh))
                    self.pool.release(table[i])
                    table[i] = fresh
                    seq.kv.published = min(seq.kv.published, i)
        return True

    def advance(self, seq: Sequence, end: int, siblings: Iterable[Sequence]) -> StateStep:
        """What a step that computes the tokens of `seq` before `end` does with its recurrent state; `siblings`: of its
        request, those that are pending begin with its prompt."""
        if self.states is None:
            return NO_STATE
        return self.states.advance(seq, end, any(each.status is Status.PENDING for each in siblings))

    def _writable(self, seq: Sequence, upto: int) -> bool:
        """Whether positions computed .. upto - 1 may be written as it is: so with most steps that decode."""
        tables, first, end = seq.kv.blocks, seq.computed // self.block_size, -(-upto // self.block_size)
        if not tables or len(tables[0]) < end:
            return False
        writable = self.pool.writable
        for table in tables:
            for block in table[first:end]:
                if not writable(block):
                    return False
        return True

    def release(self, seq: Sequence) -> None:
        """Give everything back; the tokens stay and may be computed again."""
        # Deepest first: a later block of a chain is useless without the earlier ones, so it is to be evicted first.
        for blocks in zip(*map(reversed, seq.kv.blocks), strict=True):
            for block in blocks:
                if block != SLID_OUT:
                    self.pool.release(block)
        seq.kv.blocks, seq.kv.slid = [], []
        seq.computed = seq.kv.published = 0
        if self.states is not None:
            self.states.release(seq, seq.kv.keys)

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks behind the target of `seq`: they were for drafted tokens that were not kept."""
        keep = self.sizes.entries(seq.target)
        for table in seq.kv.blocks:
            while len(table) > keep:
                self.pool.release(table.pop())

    def take_prefix(self, seq: Sequence) -> None:
        """Start from published blocks, if there are any for it."""
        prefix = self._prefix_for(seq)
        if prefix is None:
            return
        found = prefix.match(seq, self.sizes.windows)
        count = len(found[0])
        if count and not self._overfull(seq, found):
            self._open(seq)
            if self.states is not None:
                self.states.take(seq, prefix.state_after(seq, count), count * self.block_size)
            for group, table in enumerate(found):
                seq.kv.blocks[group] = table
                seq.kv.slid[group] = table.count(SLID_OUT)
                for block in table[seq.kv.slid[group] :]:
                    self.pool.acquire(block)
            seq.kv.published = count
            seq.computed = min(count * self.block_size, len(seq.tokens) - 1)
            prefix.count(seq, seq.computed, self.sizes.windows)
        if seq.times.preemptions == 0:
            seq.kv.cached_tokens = seq.computed

    def _overfull(self, seq: Sequence, found: list[list[int]]) -> bool:
        """Whether all of `seq` is `found` and the pool has no block more: the last one could never be copied to be
        written, and the sequence would wait for ever; it computes instead."""
        count = len(found[0])
        if count * self.block_size < len(seq.tokens):
            return False
        lane = self.lanes.of(count - 1)
        held = sum(self.lanes.of(i) == lane for table in found for i, b in enumerate(table) if b != SLID_OUT)
        return held + len(found) > self.pool.num_blocks // self.sizes.holders

    def stored(self, seq: Sequence, has: Stored) -> tuple[list[StoreKey], int]:
        """Blocks beyond the pool that `seq` could start from, in order, and how many tokens they would save it."""
        prefix = self._prefix_for(seq)
        return ([], 0) if prefix is None else prefix.wanted(seq, self.sizes.windows, has)

    def restore(self, seq: Sequence, found: Mapping[bytes, Any], rest: GenericSequence[StoreKey]) -> None:
        """Publish what of the prefix of `seq` was read, in blocks that the next plan fills, as far as there is room.

        `rest` is still to be read: where layers have windows or states, what was `found` is worth nothing without.
        """
        prefix, pool, tiers = self._prefix_for(seq), self.pool, self.tiers
        if prefix is None or tiers is None or not found:
            return
        expected = found.keys() | {want.key for want in rest}
        tables = prefix.match(seq, self.sizes.windows, expected.__contains__)
        held = [block for table in tables for block in table if block >= 0]
        for block in held:  # or they would be the first to make room
            pool.acquire(block)
        for i in range(len(tables[0])):
            for group, table in enumerate(tables):
                if table[i] != STORED or not pool.num_free:
                    continue
                want = prefix.wanted_at(seq, i, group)
                if want.key in found:
                    held.append(block := pool.allocate())
                    pool.publish(block, *want)
                    tiers.fill(block, want.key, found[want.key])
        for block in reversed(held):
            pool.release(block)
        if self.states is not None and tables[0]:
            want, keys = prefix.wanted_state(seq, len(tables[0])), seq.kv.keys[: len(tables[0])]
            if want.key in found and (slot := self.states.place(want, keys)) >= 0:
                tiers.fill(slot, want.key, found[want.key])

    def forget_all(self) -> None:
        """Make nothing findable any more that was published until now, here and in a store."""
        self.pool.forget_all()
        if self.states is not None:
            self.states.forget_all()
        if self.tiers is not None:
            self.tiers.forget_all()

    def publish(self, seq: Sequence, upto: int) -> None:
        """Let others find the full blocks of positions 0 .. upto - 1 of `seq`, whose values are known to be finite."""
        if self.prefix is not None:
            self.prefix.publish(seq, upto)
            if self.states is not None:
                self.states.publish(seq, upto, seq.kv.keys)

    def slide(self, seq: Sequence, upto: int) -> None:
        """Free the blocks that no row of `seq` from position `upto` on can see, nor those that are run again."""
        upto -= seq.again
        for group, window in enumerate(self.sizes.windows):
            if window and seq.kv.blocks:
                table = seq.kv.blocks[group]
                keep = min(first_seen(window, max(0, upto)) // self.block_size, len(table))
                for i in range(seq.kv.slid[group], keep):
                    self.pool.release(table[i])
                    table[i] = SLID_OUT
                seq.kv.slid[group] = max(seq.kv.slid[group], keep)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share the prompt's blocks.

        It computes the last prompt token again, for its own logits: that write copies the one block it changes, so
        that a fork needs no rule of its own.
        """
        entries = self.sizes.entries(child.prompt_len)
        child.kv.blocks = [table[:entries] for table in parent.kv.blocks]
        for table in child.kv.blocks:
            for block in table:
                if block != SLID_OUT:
                    self.pool.acquire(block)
        child.computed = child.prompt_len - 1
        if self.states is not None:
            self.states.fork(parent, child)
        child.kv.cached_tokens = child.prompt_tokens(0, child.computed)
        child.kv.slid = list(parent.kv.slid)
        child.kv.published = min(parent.kv.published, entries)
        child.kv.keys = parent.kv.keys[: child.prompt_len // self.block_size]

    def unpublished(self, seq: Sequence) -> list[int]:
        """Blocks that only `seq` holds and nobody else can find."""
        return [b for table in seq.kv.blocks for b in table if b != SLID_OUT and self.pool.writable(b)]

    def _prefix_for(self, seq: Sequence) -> PrefixCache | None:
        """A request for prompt logprobs computes everything, for it needs every logit; so does a mean of all rows."""
        every = seq.request.params.prompt_logprobs is not None or seq.request.pooling in ("mean", "cls", "all")
        return None if every else self.prefix

    def _open(self, seq: Sequence) -> None:
        seq.kv.blocks = [[] for _ in self.sizes.windows]
        seq.kv.slid = [0] * len(self.sizes.windows)

    def _missing(self, seq: Sequence, group: int, upto: int) -> list[int]:
        table, need = seq.kv.blocks[group] if seq.kv.blocks else [], self.sizes.entries(upto)
        if self.pool.lanes == 1:
            shared = [block for block in table[seq.computed // self.block_size : need] if not self.pool.writable(block)]
            return [max(0, need - len(table)) + len(shared)]
        held, wanted = self.lanes.spread(len(table)), self.lanes.spread(max(need, len(table)))
        missing = [all_ - own for all_, own in zip(wanted, held, strict=True)]
        for block in table[seq.computed // self.block_size : need]:
            missing[block % self.pool.lanes] += not self.pool.writable(block)
        return missing


def added(needs: Iterable[list[int]]) -> list[int]:
    """What they need together of each lane."""
    return [sum(lane) for lane in zip(*needs, strict=True)]
