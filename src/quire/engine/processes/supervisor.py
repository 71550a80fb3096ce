"""An engine that outlives its deaths: started anew, it goes on with every request where the last one stopped.
See docs/design/server.md.

A token depends on the request, its seed and the tokens before it alone, and all of these are kept here, outside of the
engine. So every sequence goes on bit for bit, and its client sees a pause.

A request may be why the engine died; those that were in the batch are then tried alone (`SuspectTrial`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from quire.core.config import SchedulerConfig
from quire.core.errors import EngineFailure, QuireError
from quire.core.request import Request
from quire.engine.client import EngineClient, EngineInfo, Interrupted, StepReport
from quire.engine.processes.suspects import SuspectTrial
from quire.engine.processes.unfinished import LoadedAdapters, UnfinishedRequest
from quire.engine.processes.watchdog import Watchdog
from quire.engine.stat_field import ended, over_lives
from quire.engine.stats import Stats

logger = logging.getLogger("quire.engine")


class DeathCount:
    """Counts deaths: too many within a time end it all."""

    def __init__(self, most: int, window: float) -> None:
        self._most, self._window = most, window
        self._deaths: deque[float] = deque(maxlen=most)

    def count(self, failure: EngineFailure) -> None:
        """One more. `EngineFailure` with the reason of the last when they are too many."""
        now = time.monotonic()
        self._deaths.append(now)
        times = sum(now - death < self._window for death in self._deaths)
        if times >= self._most:
            within = f"; that was death {times} within {self._window:.0f} s" if times > 1 else ""
            raise EngineFailure(failure.message + within)


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """After how many seconds without a step an engine hangs, at least (0: never); and how many deaths within `window`
    seconds are too many."""

    hang: float = 10.0
    deaths: int = 5
    window: float = 600.0


class KillableEngine(EngineClient, Protocol):
    """An engine that can be ended from outside."""

    def kill(self) -> None:
        """End it now; where it can, it says first what its threads do."""

    def cpu_wait(self) -> float:
        """Seconds for which it wanted a processor and had none, so far; 0 where that is not known."""


Start = Callable[[EngineInfo | None, Callable[[], bool]], KillableEngine]
"""Starts an engine with the limits of the one before; gives up once the second argument says so."""


class EngineStarter:
    """Starts engines one after the other, until deaths are too many or nobody wants one any more."""

    def __init__(self, start: Start, patience: RestartPolicy) -> None:
        self._start, self._toll = start, DeathCount(patience.deaths, patience.window)
        self._info: EngineInfo | None = None
        self.closed = False

    def first(self) -> KillableEngine:
        """An engine that is loaded; those that follow have its limits."""
        engine = self._start(None, lambda: self.closed)
        self._info = engine.info
        return engine

    def after(self, failure: EngineFailure, waiting: int) -> KillableEngine:
        """The one after an engine that ended so. `EngineFailure` when too many died. `waiting`: requests that do."""
        while True:
            if not isinstance(failure, Interrupted):
                self._toll.count(failure)
            logger.error("%s; it is started again, and %d requests wait", failure.message, waiting)
            try:
                engine = self._start(self._info, lambda: self.closed)
            except EngineFailure as died:
                if self.closed:
                    raise
                failure = died
                continue
            except QuireError as error:
                message = f"{failure.message}; it could not be started again: {error.message}"
                raise EngineFailure(message) from None
            if self.closed:
                engine.close()
                raise EngineFailure("the engine was closed")
            return engine


class SupervisedEngine:
    """`EngineClient` over engines that `start` makes; `poll` finds out that one died, and starts the next."""

    def __init__(
        self,
        start: Start,
        patience: RestartPolicy,
        limits: SchedulerConfig,
        on_death: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_death` is called before the next engine is started: it may `release` what others can go on with."""
        self._on_death = on_death
        self._starting = EngineStarter(start, patience)
        self._lock = threading.RLock()
        self._engine: KillableEngine | None = self._starting.first()
        self._info = self._engine.info
        self._kept: dict[str, UnfinishedRequest] = {}
        self._names: dict[str, UnfinishedRequest] = {}
        self._trial = SuspectTrial(limits.max_num_seqs)
        self._adapters = LoadedAdapters()
        self._stats = self._before = Stats(total_blocks=self._info.num_blocks)
        self._watchdog = Watchdog(patience.hang, limits.rows(self._info.max_model_len))
        self._restarts = 0
        self.renewing = False  # a `restart` is still to be done

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded model."""
        return self._info

    @property
    def ready(self) -> bool:
        """False while the engine is started anew."""
        return self._engine is not None

    def restart(self) -> None:
        """End the engine and start the next, in `poll`; it counts against nobody."""
        self.renewing = True

    def submit(self, request: Request) -> None:
        """Keep a request and hand it over, now or when there is an engine again."""
        with self._lock:
            kept = self._kept[request.id] = UnfinishedRequest(request, self._restarts)
            if not self._trial:
                self._hand_over(kept)

    def holds(self, request_id: str) -> bool:
        """Whether anything of a request goes on here."""
        return request_id in self._kept

    def release(self, ended: bool) -> list[UnfinishedRequest]:
        """Give up what others may go on with; those that are tried alone only once this one has `ended`."""
        with self._lock:
            gone = [kept for kept in self._kept.values() if ended or kept not in self._trial]
            for kept in gone:
                kept.since -= self._restarts
                del self._kept[kept.request.id]
                self._names.pop(kept.name, None)
            return gone

    def give(self, request_id: str) -> UnfinishedRequest | None:
        """Give up one request that another goes on with, and not because of a death; None: it is not to leave."""
        with self._lock:
            kept = self._kept.get(request_id)
            if kept is None or kept in self._trial:
                return None
            kept.since -= self._restarts - 1
            del self._kept[request_id]
            self._withdraw(kept)
            return kept

    def adopt(self, kept: UnfinishedRequest) -> None:
        """Go on with a request that another one has released."""
        with self._lock:
            kept.since += self._restarts - 1
            self._kept[kept.request.id] = kept
            if not self._trial:
                self._hand_over(kept)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Forget a request, or one of its sequences; unknown ids are ignored."""
        with self._lock:
            kept = self._kept.get(request_id)
            if kept is None:
                return
            if index is not None:
                kept.drop(index)
            if index is not None and kept.live:
                if kept.name in self._names:
                    self._send(lambda engine: engine.abort(kept.name, index))
                return
            del self._kept[request_id]
            self._withdraw(kept)

    def pause(self, request_id: str) -> bool:
        """Take a request from the engine; its blocks are free. False where it is tried alone, or ended already."""
        with self._lock:
            kept = self._kept.get(request_id)
            if kept is None or kept in self._trial:
                return False
            kept.paused = True
            self._withdraw(kept)
            return True

    def resume(self, request_id: str) -> None:
        """Go on with a request as after a death: behind what came of it."""
        with self._lock:
            kept = self._kept.get(request_id)
            if kept is not None and kept.paused:
                kept.paused = False
                if not self._trial:
                    self._hand_over(kept)

    def change_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter, or unload it (""), now or when there is an engine again."""
        with self._lock:
            self._adapters.ask(name, folder)
            self._watchdog.reset()
            self._send(lambda engine: engine.change_adapter(name, folder))

    def reset_prefix_cache(self) -> None:
        """Now; an engine that comes after this one has an empty one."""
        self._send(lambda engine: engine.reset_prefix_cache())

    def poll(self, timeout: float) -> StepReport | None:
        """The next step's report. `EngineFailure` when engines died too often."""
        engine = self._engine
        assert engine is not None, "only one thread polls"
        try:
            if self.renewing:
                raise Interrupted("the engine is to be started anew")
            report = engine.poll(timeout)
            if report is None:
                with self._lock:
                    self._try_next()  # whoever ran alone may have left
                self._watchdog.check(bool(self._names), self._adapters.changing, engine, self._most_image_rows)
                return None
        except EngineFailure as failure:
            return None if self._starting.closed else self._restart_and_replay(failure)
        with self._lock:
            self._watchdog.learn(report.stats)
            report = self._take(report)
            self._try_next()
        return report

    def _most_image_rows(self) -> int:
        """Rows of the largest image of the requests that go on."""
        with self._lock:
            return max((p.rows for kept in self._kept.values() for p in kept.request.images), default=0)

    def close(self) -> None:
        """End the engine, also one that is being started."""
        self._starting.closed = True
        with self._lock:
            if self._engine is not None:
                self._engine.close()

    def _send(self, call: Callable[[EngineClient], None]) -> None:
        """Call the engine where there is one. That it has just died `poll` finds out, and the next is sent all."""
        if self._engine is not None:
            try:
                call(self._engine)
            except EngineFailure as failure:
                logger.debug("not sent: %s", failure)

    def _hand_over(self, kept: UnfinishedRequest) -> None:
        if self._engine is not None and not kept.paused:
            self._names.pop(kept.name, None)
            request = kept.replay_request()
            self._names[request.id] = kept
            self._send(lambda engine: engine.submit(request))

    def _withdraw(self, kept: UnfinishedRequest) -> None:
        if self._names.pop(kept.name, None) is not None:
            self._send(lambda engine: engine.abort(kept.name))

    def _take(self, report: StepReport) -> StepReport:
        """Remember what came; what nobody wants any more, or an earlier attempt said, is dropped."""
        outputs = []
        portable = tuple(self._names[name].request.id for name in report.portable if name in self._names)
        for output in report.outputs:
            kept = self._names.get(output.request_id)
            if kept is not None:
                kept.take(output)
                output.restarts = self._restarts - kept.since
                outputs.append(output)
                if not kept.live:
                    del self._names[kept.name], self._kept[kept.request.id]
        changes = tuple(change for change in report.changes if self._adapters.settle(change))
        self._stats = report.stats
        if self._restarts:
            self._stats = replace(over_lives([self._before, report.stats]), restarts=self._restarts)
        return StepReport(outputs, self._stats, changes, portable)

    def _restart_and_replay(self, failure: EngineFailure) -> StepReport:
        """Start the next engine. A request that is known to have ended the last one gets an error."""
        began = time.monotonic()
        with self._lock:
            assert self._engine is not None
            dead, self._engine = self._engine, None
            self._before = ended(self._stats)
            self._names.clear()
            guilty = self._trial.blame(self._kept, failure)
        self._on_death()
        dead.close()
        engine = self._starting.after(failure, len(self._kept))
        with self._lock:
            self._engine, self.renewing = engine, False
            self._watchdog.reset()
            self._restarts += 1
            for name, folder in self._adapters.all().items():
                engine.change_adapter(name, folder)
            if self._trial:
                self._try_next()
            else:
                self._resubmit_all()
            self._stats = replace(self._before, restarts=self._restarts, waiting=len(self._kept))
        logger.warning("the engine is back after %.1f s", time.monotonic() - began)
        return StepReport(guilty, self._stats)

    def _try_next(self) -> None:
        """Go on with the trial; all run again once it is over."""
        if self._trial and self._trial.over(self._kept, self._hand_over, self._withdraw):
            self._resubmit_all()

    def _resubmit_all(self) -> None:
        for kept in self._kept.values():
            self._hand_over(kept)
