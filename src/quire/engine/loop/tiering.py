"""When blocks go to the store behind an engine's cache, and what becomes of it at the end."""

from __future__ import annotations

import atexit
import logging
import time
import weakref

from quire.core.plan import NO_WORK, StepPlan
from quire.core.tiers import FLUSH_SECONDS
from quire.engine.loop.block_store import BlockStore
from quire.run.runner import Runner
from quire.sched.scheduler import Scheduler
from quire.sched.shares import drew

log = logging.getLogger(__name__)


class Tiering:
    """Writes what `scheduler`'s blocks hold to `store` while an engine has nothing else to do."""

    def __init__(self, store: BlockStore, scheduler: Scheduler, runner: Runner) -> None:
        self.store, self.tiers = store, store.tiers
        self._scheduler, self._runner, self._closed = scheduler, runner, False
        _LIVE.add(self)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """The step of `plan` took so long: what computing costs."""
        prompts = sum(chunk.count for chunk in plan.chunks if not drew(chunk))
        self.tiers.rates.computed(prompts, plan.num_tokens, seconds)

    def write_behind(self) -> bool:
        """Keep some more of what can be found, while there is no work; whether there is yet more."""
        more = self.tiers.behind(self.store.behind)
        self._runner.move_blocks(self._scheduler.upkeep.take(more=more))
        return self.tiers.unsaved > 0

    def forget(self) -> None:
        """Later requests find nothing of what was kept. What is being read comes too late."""
        self._scheduler.room.compute_instead()
        tables = self._scheduler.tables
        tables.pool.forget_all()
        if tables.prefix is not None:
            tables.prefix.rekey(self.store.secret)

    def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Keep all that can be found, for so long at most. May be called twice."""
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + seconds
        try:
            while self.write_behind() and time.monotonic() < end:
                if self.tiers.store.full():
                    self.tiers.store.settle()
            self._runner.move_blocks(NO_WORK)
        except ValueError as error:  # a rank has ended: nobody has its part of what is left
            log.warning("blocks that no store has are not kept: %s", error)
        self.tiers.close(max(0.1, end - time.monotonic()))


_LIVE: weakref.WeakSet[Tiering] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for tiering in list(_LIVE):
        tiering.close()
