"""Recurrent states of the fake engine: the tokens before them, in a dictionary of slots."""

from __future__ import annotations

from quire.cache.blocks import BlockPool
from quire.cache.states import StateSlots
from quire.core.plan import STORES, Chunk, Fill, Save, StepPlan
from quire.sched.scheduler import Scheduler

NAN = ("nan",)
"""What a poisoned request writes."""


class NoStates:
    """The model has none."""

    slots: StateSlots | None = None
    pool: BlockPool | None = None

    def run(self, chunk: Chunk, tokens: list[int], sick: bool) -> None:
        """Nothing is read or stored."""

    def check_writers(self, plan: StepPlan) -> None:
        """Nothing is written."""

    def check(self, scheduler: Scheduler, filled: set[int]) -> None:
        """Nothing is owned."""

    def saved(self, save: Save) -> list[object]:
        """There is nothing that could be kept."""
        raise AssertionError(f"a state is saved where there is none: {save}")

    def fill(self, fill: Fill) -> None:
        """There is nothing that could come back."""
        raise AssertionError(f"a state comes back where there is none: {fill}")

    def check_drained(self) -> None:
        """Nothing is left."""


class FakeStates(NoStates):
    """Slots and what lies in them."""

    slots: StateSlots
    pool: BlockPool

    def __init__(self, slots: StateSlots) -> None:
        self.slots, self.pool, self._size = slots, slots.pool, slots.block_size
        self.held: dict[int, list[object]] = {}
        self.begun = self.again = 0

    def run(self, chunk: Chunk, tokens: list[int], sick: bool) -> None:
        """Read and store states as the kernels would."""
        seq, (source, stores, _) = chunk.seq, chunk.state
        who = seq.request.adapter, seq.request.cache_salt
        first = chunk.start - chunk.again
        held = [who] if source < 0 else self.held[source]
        assert sick or held == [who, *tokens[:first]], f"{seq} begins at {first} with {held}"
        self.begun += source >= 0 and not self.slots.pool.refs[source]
        self.again += chunk.again
        certain = len(tokens) - len(seq.draft.tokens)
        for rows, slot in stores:
            assert 0 < rows <= chunk.rows and first + rows <= certain, "a state passes a token that may be taken back"
            self.held[slot] = [who, *(NAN if sick else tokens[: first + rows])]

    def check_writers(self, plan: StepPlan) -> None:
        """What a step stores is of one sequence, nobody else reads it, and nobody can find it."""
        stored = [slot for chunk in plan.chunks for _, slot in chunk.state.stores]
        assert len(stored) == len(set(stored)), "two states would be stored in one slot"
        for chunk in plan.chunks:
            others = {slot for other in plan.chunks if other is not chunk for _, slot in other.state.stores}
            assert chunk.state.source not in others, "a state is read while another is stored there"
        assert all(self.slots.pool._key[slot] is None for slot in stored), "a snapshot would be overwritten"
        assert all(len(chunk.state.stores) <= STORES for chunk in plan.chunks)

    def saved(self, save: Save) -> list[object]:
        """What the slot holds, which is what it was published for."""
        held = self.held[save.block]
        assert NAN[0] not in held and held[-self._size :] == list(save.tokens), "a state is saved too late"
        return list(held)

    def fill(self, fill: Fill) -> None:
        """What was saved."""
        self.held[fill.block] = list(fill.data)

    def check(self, scheduler: Scheduler, filled: set[int]) -> None:
        """The invariants of ownership, and of what others find; slots that the next plan fills hold nothing yet."""
        pool = self.slots.pool
        self.slots.check()
        owners = [0] * pool.num_blocks
        for seq in (seq for siblings in scheduler.requests.values() for seq in siblings):
            state = seq.state
            assert state is not None and 0 <= state.tokens <= max(0, seq.computed)
            for slot in (state.slot, state.next, *(each.slot for each in state.snapshots)):
                if slot >= 0:
                    owners[slot] += 1
            assert (state.trail is not None) == (seq in self.slots._trails)
            if state.trail is not None:
                tokens, slot, known, _ = state.trail
                owners[slot] += 1
                assert known < len(seq.tokens) and self.held[slot][1:] == seq.tokens[:tokens], "a trail of other tokens"
        for slot in self.slots._leaving:
            owners[slot] += 1
        assert owners == list(pool.refs), "reference counts of states differ from the owners that exist"
        for slot in pool._by_key.values():
            if slot in filled:
                continue
            held = self.held[slot]
            assert held[-self._size :] == list(pool.tokens(slot)), "a snapshot is of other tokens"

    def check_drained(self) -> None:
        """No slot has an owner."""
        self.slots.begin()
        assert self.slots.pool.num_used == 0
