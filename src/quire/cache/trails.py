"""States that running sequences hold back, until they end, at the end of their last whole block: where the next prompt
of a conversation goes on. See docs/design/states.md."""

from __future__ import annotations

from collections.abc import Callable

from quire.cache.blocks import BlockPool
from quire.core.sequence import Sequence, Snapshot, StateSlot


def state_of(seq: Sequence) -> StateSlot:
    """Where the state of a sequence lies."""
    assert seq.state is not None, "sequences of models with recurrent states have one"
    return seq.state


def trails_of(state: StateSlot) -> list[Snapshot]:
    """States that trail a sequence: those whose numbers are not known yet, and the one that it holds."""
    held = [] if state.trail is None else [state.trail]
    return [*(each for each in state.snapshots if each.trails), *held]


class Trails:
    """The one writer of `StateSlot.trail`. Whoever needs a slot and finds none takes that of a trail."""

    def __init__(self, pool: BlockPool, give_back: Callable[[int], None]) -> None:
        """`give_back` a slot of `pool`."""
        self._pool, self._give_back = pool, give_back
        self._held: dict[Sequence, Snapshot] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._held

    def hold(self, seq: Sequence, trail: Snapshot | None) -> None:
        """Let `seq` have this trail, or none, in place of the last."""
        if (last := self.take(seq)) is not None:
            self._give_back(last.slot)
        if trail is not None:
            state_of(seq).trail = self._held[seq] = trail

    def take(self, seq: Sequence) -> Snapshot | None:
        """The trail of `seq`, which has none then; whoever takes it owns the slot."""
        state_of(seq).trail = None
        return self._held.pop(seq, None)

    def alone(self, state: StateSlot) -> bool:
        """Whether `state` could be overwritten if it were not to trail its sequence."""
        trailing = sum(each.slot == state.slot for each in trails_of(state))
        return trailing > 0 and self._pool.refs[state.slot] == 1 + trailing

    def droppable(self) -> list[Sequence]:
        """Sequences whose trail has a slot of its own."""
        return [seq for seq, each in self._held.items() if self._pool.refs[each.slot] == 1]

    def drop(self, seq: Sequence, slot: int) -> None:
        """Forget what trails `seq` in `slot`."""
        state = state_of(seq)
        for each in [each for each in state.snapshots if each.trails and each.slot == slot]:
            state.snapshots.remove(each)
            self._give_back(slot)
        if state.trail is not None and state.trail.slot == slot:
            self.hold(seq, None)

    def drop_least(self) -> bool:
        """Make a slot free by forgetting the trail that saves least; whether there was one in a slot of its own."""
        droppable = self.droppable()
        if droppable:
            self.hold(min(droppable, key=lambda seq: self._held[seq].tokens - state_of(seq).nearest), None)
        return bool(droppable)
