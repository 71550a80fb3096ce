"""The model without tensors, with a store behind its cache that takes some steps to read."""

from __future__ import annotations

import random
from collections.abc import Sequence as GenericSequence
from dataclasses import replace
from typing import Any

from fake_runner import NAN, FakeEngine
from quire.cache.tiers import Store, StoreKey, StoreRead, StoreSizes, Tiers
from quire.core.plan import BlockWork
from quire.core.request import Output

SIZES = StoreSizes(1, 1)


class FakeTiers(Tiers):
    """Tiers that read in so many steps as `delays` draws, and always; a piece is `piece` blocks."""

    def __init__(self, store: Store, delays: random.Random, piece: int = 3) -> None:
        super().__init__(store, SIZES)
        self.piece, self._delays = piece, delays
        self._late: list[tuple[int, StoreRead]] = []
        self.rates.pays = lambda nbytes, tokens: True  # type: ignore[method-assign]

    def read(self, wanted: GenericSequence[StoreKey]) -> StoreRead:
        """Not yet."""
        reading = StoreRead(wanted)
        self._late.append((self._delays.randint(0, 3), reading))
        return reading

    def tick(self) -> None:
        """A step has passed."""
        for _, reading in (each for each in self._late if not each[0]):
            reading.found = {} if reading.dropped else self.store.read(reading.wanted)
            reading.done.set()
        self._late = [(left - 1, reading) for left, reading in self._late if left]


class StoringEngine(FakeEngine):
    """`FakeEngine` with `store`; engines with one store find each other's blocks."""

    secret = b"secret"

    def __init__(self, *sizes: Any, store: Store, **more: Any) -> None:
        self.behind = self.tiers = FakeTiers(store, random.Random(1))
        super().__init__(*sizes, **more)

    def step(self) -> list[Output]:
        """What is read comes nearer."""
        self.behind.tick()
        return super().step()

    def _prepare(self, work: BlockWork) -> None:
        """Moves, saves, wipes, fills, block copies."""
        size = self.block_size
        super()._prepare(replace(work, wipes=(), copies=()))
        for save in work.saves:
            if save.state:
                self.behind.store.put(save.key, save.tokens, self.states.saved(save))
                continue
            held = [self.cache.get(save.block * size + offset, NAN) for offset in range(size)]
            assert NAN not in held and [value[-1] for value in held] == list(save.tokens), "a block is saved too late"
            self.behind.store.put(save.key, save.tokens, held)
        super()._prepare(replace(work, moves=(), copies=()))
        for fill in work.fills:
            if fill.state:
                self.states.fill(fill)
                continue
            for offset, value in enumerate(fill.data):
                self.cache[fill.block * size + offset] = value
        super()._prepare(replace(work, moves=(), wipes=()))

    def keep_all(self) -> None:
        """As at an engine's end: all that can be found goes to the store."""
        assert self._launched is None
        saves = self.behind.behind(10**9)
        work = self.scheduler.block_work.take(more=saves)
        self._unwiped -= set(work.wipes)
        self._prepare(work)
