"""The histories of T11 with a store behind the pool: every invariant, and outputs as if run alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from quire.cache.host import HostStore
from scheduler_histories import COMMON, ENGINES, Machine
from storing_engine import SIZES, StoringEngine


class StoringMachine(Machine):
    """Blocks go to a store that has room for few, and come back some steps later; it is emptied now and then."""

    engine: StoringEngine

    @initialize(form=st.fixed_dictionaries(ENGINES | {"prefix": st.just(True)}), room=st.integers(1, 40))
    def start(self, form: dict[str, Any], room: int) -> None:  # type: ignore[override]
        """Build an engine with a store."""
        self.made = partial(StoringEngine, store=HostStore(room, SIZES))
        super().start(form)

    @rule()
    def forget(self) -> None:
        """Reset the prefix cache; what is being read comes too late."""
        self.engine.scheduler.room.compute_instead()
        self.engine.scheduler.tables.forget_all()

    @precondition(lambda self: self.engine._launched is None)
    @rule()
    def keep(self) -> None:
        """As in a pause."""
        self.engine.keep_all()


class StoringStatesMachine(StoringMachine):
    """The same with recurrent states, whose snapshots go there, too."""

    @initialize(
        form=st.fixed_dictionaries(ENGINES | {"prefix": st.just(True)}),
        room=st.integers(1, 60),
        slots=st.integers(2, 12),
        interval=st.sampled_from([1, 2, 3]),
    )
    def start(self, form: dict[str, Any], room: int, slots: int, interval: int) -> None:  # type: ignore[override]
        """Build an engine with a store, and slots of states; `interval` in blocks."""
        store, tokens = HostStore(room, SIZES), interval * form["block_size"]
        self.made = partial(StoringEngine, store=store, slots=slots, interval=tokens)
        Machine.start(self, form)


StoringStatesMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, **COMMON)
TestStoringStatesMachine = StoringStatesMachine.TestCase
StoringMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, **COMMON)
TestStoringMachine = StoringMachine.TestCase


@pytest.mark.slow
class TestStoringMachineLong(StoringMachine.TestCase):  # type: ignore[name-defined,misc]
    """The same machine over more histories."""

    settings = settings(max_examples=1000, stateful_step_count=60, **COMMON)


@pytest.mark.slow
class TestStoringStatesLong(StoringStatesMachine.TestCase):  # type: ignore[name-defined,misc]
    """The same with states."""

    settings = settings(max_examples=1000, stateful_step_count=60, **COMMON)
