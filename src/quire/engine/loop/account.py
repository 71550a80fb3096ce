"""What is verified while an engine has nothing to do: that other ranks live, and part by part who holds blocks."""

from __future__ import annotations

from quire.engine.loop.experts import ExpertCounts
from quire.run.executor import Executor
from quire.sched.scheduler import Scheduler


class Account:
    """Of the blocks of a KV cache. `unchecked`: not all of it was verified since the last step."""

    def __init__(self, scheduler: Scheduler, executor: Executor, experts: ExpertCounts | None) -> None:
        self._pool, self._scheduler, self._executor, self._experts = scheduler.tables.pool, scheduler, executor, experts
        self.unchecked = True

    def check(self, part: bool) -> None:
        """Verify all of it, or the next `part` of what is `unchecked`, which takes less than a millisecond;
        AssertionError names what is wrong. `EngineFailure` when another rank has ended."""
        self._executor.check()
        if self._experts is not None:
            self._experts.keep()
        if not part:
            self._pool.check()
        elif self.unchecked:
            self.unchecked = self._pool.check_more()
        used = self._pool.num_used
        assert self._scheduler.has_work or not used, f"{used} blocks are held by nobody"
