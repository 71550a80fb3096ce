"""Slots of recurrent states: one for each sequence that runs, and snapshots with which others begin.
See docs/design/states.md.

A slot holds the states of all recurrent layers after the first tokens of a sequence. Slots are owned, published, found
and evicted as blocks are (`BlockPool`): a snapshot is a slot that is published under the key of its prefix. A slot that
is published or shared is never written: the step that reads it stores the next state in another one.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.cache.blocks import BlockListener, BlockPool, state_key
from quire.cache.snapshots import SnapshotValues
from quire.cache.tiers import StoreKey
from quire.cache.trails import Trails, state_of, trails_of
from quire.core.plan import STORES, StateStep
from quire.core.sequence import Sequence, Snapshot, StateSlot

CLOSE = 192
"""Tokens between snapshots of a prompt while there are slots without content."""


class StateSlots:
    """The one writer of `Sequence.state`.

    One rule: a state never passes a token that may be taken back. Tokens between it and those that are computed are
    run again at the head of the next step, so drafts, forks and the last token of a prompt that was found whole need no
    rule of their own.
    """

    def __init__(
        self,
        slots: int,
        block_size: int,
        interval: int,
        sequences: int,
        watcher: BlockListener | None = None,
        values: SnapshotValues | None = None,
    ) -> None:
        """`interval`: tokens between snapshots, whole blocks; 0: there are none. `sequences`: that run at most.
        `watcher` is told what becomes of snapshots; `values` says which makes room."""
        self.pool, self.block_size, self.interval = BlockPool(slots, watcher=watcher), block_size, interval
        self.close = CLOSE
        self._sequences, self._values = sequences, SnapshotValues() if values is None else values
        self._leaving: list[int] = []  # read by the step that was planned last; it may not be written by that one
        self._trails = Trails(self.pool, self._give_back)
        self._due = 0  # slots that sequences of the plan under way are still to be given

    def begin(self, running: Iterable[Sequence] = ()) -> None:
        """Begin a plan for `running`: what the last one reads may be written by this one."""
        for slot in self._leaving:
            self._give_back(slot)
        self._leaving.clear()
        self._due = sum(map(self.missing, running))

    def missing(self, seq: Sequence) -> int:
        """How many slots must be allocated so that the next state of `seq` can be stored."""
        state = state_of(seq)
        return int(not self._writable(state) and not self._trails.alone(state))

    def _writable(self, state: StateSlot) -> bool:
        return state.next >= 0 or (state.slot >= 0 and self.pool.writable(state.slot))

    def fit(self, sequences: Iterable[Sequence]) -> bool:
        """Whether there are slots for the next state of each."""
        need = sum(map(self.missing, sequences))
        return need <= self.pool.num_free or need <= self.pool.num_free + len(self._trails.droppable())

    def reserve(self, seq: Sequence) -> bool:
        """Make room for the next state, for which trails give way; False where no slot is left."""
        state = state_of(seq)
        if self._writable(state):
            return True
        if self._trails.alone(state):
            if self._spare:
                state.next = self._allocate()
            else:
                self._trails.drop(seq, state.slot)
            return True
        if not self.pool.num_free and not self._trails.drop_least():
            return False
        state.next, self._due = self._allocate(), max(0, self._due - 1)
        return True

    def _allocate(self) -> int:
        """A slot that nobody has, for which the snapshot that is worth least makes room if need be."""
        if self.pool.would_evict():
            self.pool.evict(self._values.pop_least(lambda slot: not self.pool.refs[slot]))
        return self.pool.allocate()

    def _give_back(self, slot: int) -> None:
        self.pool.release(slot)
        if not self.pool.refs[slot]:
            self._values.use(slot)

    def advance(self, seq: Sequence, end: int, forks: bool) -> StateStep:
        """What a step that computes the tokens before `end` does with the state of `seq`, which has a slot reserved.

        `forks`: others wait to begin with its prompt, whose last token they compute again.
        """
        state, again, sure = state_of(seq), seq.again, min(end, len(seq.tokens) + seq.in_flight)
        certain = min(sure, seq.prompt_len - 1) if forks else sure
        first, source, stores = state.tokens, state.slot, list[tuple[int, int]]()
        if certain <= first:
            return StateStep(source, again=again)
        if state.next >= 0:
            if source >= 0:
                self._leaving.append(source)
            state.slot, state.next = state.next, -1
        kept = list[Snapshot]()

        def keep(tokens: int, trails: bool = False) -> None:
            if tokens == certain:  # shared: the next step stores to another slot
                self.pool.acquire(slot := state.slot)
            elif len(stores) < STORES - 1:
                stores.append((tokens - first, slot := self._allocate()))
            else:
                return
            kept.append(Snapshot(tokens, slot, sure, trails))
            state.nearest = state.nearest if trails else max(state.nearest, tokens)

        needed = self.snapshots(seq, certain)[:STORES]
        for tokens in needed:
            if self._spare:
                keep(tokens)
        for tokens in self._close(seq, certain):
            if tokens not in needed and self._free:
                keep(tokens)
        last = certain // self.block_size * self.block_size
        if last > first and last >= seq.prompt_len and last not in needed and self._may_trail(state, last):
            keep(last, trails=True)
        state.snapshots += sorted(kept)
        state.tokens = certain
        return StateStep(source, (*stores, (certain - first, state.slot)), again)

    def _may_trail(self, state: StateSlot, tokens: int) -> bool:
        """Whether the state after `tokens` tokens is to trail its sequence: it takes the slot of an earlier one, or one
        whose content is worth less, with one left for a snapshot."""
        if not self.interval or trails_of(state):
            return self.interval > 0 and self._spare
        if not self._has_spare(1):
            return False
        saved = tokens - state.nearest
        return self._free or self._values.exceeds_least(saved, lambda slot: not self.pool.refs[slot])

    @property
    def _spare(self) -> bool:
        """Whether a slot may be had for a snapshot."""
        return self._has_spare()

    @property
    def _free(self) -> bool:
        """Whether a slot without content may be had, with one left for a snapshot."""
        return not self.pool.would_evict() and self._has_spare(1)

    def _has_spare(self, more: int = 0) -> bool:
        """Whether a slot may be had and `more` are left, with one for each sequence of the plan and each that may
        come."""
        return self.pool.num_free > more + max(self._due, self._sequences - self.pool.num_used)

    def snapshots(self, seq: Sequence, end: int) -> list[int]:
        """Tokens up to `end` behind which the state of `seq` is to be published, beyond the state that it has.

        They are the prompt's last whole block, the end of what was found of another prompt, and every `interval`.
        """
        if not self.interval:
            return []
        state, size = state_of(seq), self.block_size
        first, ends = state.tokens, {(seq.prompt_len - 1) // size * size, state.shared}
        ends.update(range((first // self.interval + 1) * self.interval, end + 1, self.interval))
        return sorted(tokens for tokens in ends if first < tokens <= end)

    def _close(self, seq: Sequence, end: int) -> list[int]:
        """Tokens of the prompt up to `end` behind which its state is published while there are slots without content:
        every `CLOSE`, for prompts that will share some of it."""
        first, every = state_of(seq).tokens, -(-self.close // self.block_size) * self.block_size
        if every >= self.interval or self.pool.watcher is not None or not self._free:
            return []
        return list(range((first // every + 1) * every, min(end + 1, seq.prompt_len), every))

    def reach(self, seq: Sequence, count: int) -> int:
        """How many of `count` tokens a step may compute so that all snapshots behind them can be stored."""
        end = seq.computed + count
        ends = sorted({n for n in (*self.snapshots(seq, end), *self._close(seq, end)) if n > seq.computed})
        return min(count, ends[STORES - 1] - seq.computed) if len(ends) >= STORES else count

    @property
    def held(self) -> int:
        """Slots that sequences have."""
        return self.pool.num_used - len(set(self._leaving))

    def take(self, seq: Sequence, slot: int, tokens: int) -> None:
        """Begin with a published state, after the first `tokens` tokens."""
        state = state_of(seq)
        self.pool.acquire(slot)
        state.slot, state.tokens = slot, tokens
        state.nearest = tokens

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` begin with the state of `parent`, which has not passed the prompt's last token."""
        state = state_of(parent)
        assert state.tokens < child.prompt_len, "a state that others begin with waits for them"
        if state.slot >= 0:
            self.take(child, state.slot, state.tokens)
            state_of(child).nearest = state.nearest

    def publish(self, seq: Sequence, upto: int, keys: list[bytes]) -> None:
        """Let others find the snapshots that steps stored which computed at most `upto` tokens, whose values are known
        to be finite. `keys`: the hash chain of its blocks."""
        state = state_of(seq)
        while state.snapshots and state.snapshots[0].known <= upto:
            known = state.snapshots.pop(0)
            self._trails.hold(seq, known if known.trails else None)
            if not known.trails:
                self._publish_of(seq, known, keys)

    def _publish_of(self, seq: Sequence, known: Snapshot, keys: list[bytes]) -> None:
        tokens, size = known.tokens, self.block_size
        own = StoreKey(state_key(keys[tokens // size - 1]), tuple(seq.tokens[tokens - size : tokens]))
        # Whoever comes back to a snapshot that made room goes on there: this is not where two prompts parted.
        parted = tokens == state_of(seq).shared and not self.pool.was_evicted(own.key)
        self._publish(known.slot, own, keys[: tokens // size], parted, tokens >= seq.prompt_len)

    def place(self, want: StoreKey, keys: list[bytes]) -> int:
        """A slot that others find under `want` from now on, to be filled by the next plan; -1 where none is free, or
        there is such a snapshot. `keys`: the hash chain of the blocks before it."""
        if not self._spare or self.pool.published(want.key):
            return -1
        slot = self._allocate()
        self._publish(slot, want, keys)
        return slot

    def _publish(
        self, slot: int, want: StoreKey, keys: list[bytes], shared: bool = False, answer: bool = False
    ) -> None:
        if self.pool.publish(slot, *want):
            self._values.add(slot, len(keys) * self.block_size, map(state_key, reversed(keys)), shared, answer)
        self._give_back(slot)

    def forget_all(self) -> None:
        """Make no snapshot findable any more."""
        self.pool.forget_all()
        self._values.clear()

    def check(self) -> None:
        """Verify the account of slots and snapshots; AssertionError names what is wrong."""
        self.pool.check()
        assert len(self._values) == self.pool.num_cached, "snapshots are worth something that cannot be found"

    def release(self, seq: Sequence, keys: list[bytes]) -> None:
        """Give back all slots of `seq`, and publish its trail. `keys`: the hash chain of its blocks."""
        state = state_of(seq)
        if trail := self._trails.take(seq):
            self._publish_of(seq, trail, keys)
        for slot in (state.slot, state.next, *(each.slot for each in state.snapshots)):
            if slot >= 0:
                self._give_back(slot)
        state.clear()
