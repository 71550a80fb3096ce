"""An engine in the caller's own process: `poll` runs a step, `run` all steps of some requests."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
from collections.abc import Callable, Generator
from functools import wraps
from typing import ParamSpec, TypeVar

from quire.core.config import EngineConfig
from quire.core.errors import BadRequest, ConfigError, EngineFailure, told_error
from quire.core.exclusions.exclusion import Known
from quire.core.exclusions.features import IN_PROCESS
from quire.core.exclusions.table import check_known
from quire.core.files import LoadProgress
from quire.core.request import Output, Request
from quire.engine.client import AdapterChanged, ChangeAdapter, EngineInfo, StepReport
from quire.engine.start import build_engine, start_engine, with_options
from quire.run.executor import Executor
from quire.text.structured.refused_grammars import REFUSED

P = ParamSpec("P")
T = TypeVar("T")
WAIT_SECONDS = 0.001


class _Calls:
    """Calls of all threads: the interpreter's end waits for those that are under way, and threads that come later end.

    Python ends a daemon thread where it next takes the interpreter's lock. Within native code that is in a destructor,
    from which no thread may leave: the whole process would end by SIGABRT.
    """

    def __init__(self) -> None:
        self.inside: set[int] = set()
        self.last: int | None = None

    def end(self) -> None:
        """Note that from now on only this thread calls."""
        self.last = threading.get_ident()
        while self.inside - {self.last}:
            time.sleep(WAIT_SECONDS)

    def forget(self) -> None:
        """A fork took one thread along."""
        self.inside.clear()


_CALLS = _Calls()
atexit.register(_CALLS.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_CALLS.forget)


def finished_before_the_end(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, whose calls in other threads the interpreter's end waits for."""

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> T:
        me = threading.get_ident()
        if me in _CALLS.inside:
            return function(*args, **named)
        _CALLS.inside.add(me)  # before the question, so that the end sees this thread or this thread sees the end
        try:
            if _CALLS.last not in (None, me):
                raise SystemExit  # ends the thread, as Python is about to
            return function(*args, **named)
        finally:
            _CALLS.inside.discard(me)

    return call


class LocalEngine:
    """`EngineClient` without a second process; used by the `LLM` class, the benchmarks and the tests."""

    @finished_before_the_end
    def __init__(self, config: EngineConfig, progress: LoadProgress | None = None) -> None:
        check_known(config.features, Known(frozenset({IN_PROCESS})))
        self.engine = start_engine(config, progress)
        self._info = self.engine.info()
        self._refused: list[Output] = []
        self._changes: list[AdapterChanged] = []
        self._aborted = self._running = self._closed = False

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded model."""
        return self._info

    @property
    def ready(self) -> bool:
        """Always: nothing starts it again."""
        return True

    @finished_before_the_end
    def with_adapter(self, name: str, folder: str) -> str:
        """`name`, once the LoRA adapter in `folder` is loaded under it."""
        self.engine.adapting.load(name, folder)
        return name

    @finished_before_the_end
    def change_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter, or unload it where `folder` is empty; the next `poll` reports it."""
        self._changes.append(self.engine.adapting.change(ChangeAdapter(name, folder)))

    def reset_prefix_cache(self) -> None:
        """Later requests find nothing of earlier ones."""
        self.engine.reset_prefix_cache()

    @finished_before_the_end
    def rearrange(self, config: EngineConfig) -> None:
        """Go on with the same weights under other options of cache, steps and look-ups that draft, while nothing runs.

        `ConfigError` where the weights would be others, or requests run; where a start would refuse the options, too,
        and then this engine is closed.
        """
        if self.engine.has_work:
            raise ConfigError("rearrange: the engine runs requests")
        loaded = with_options(self.engine.executor, config)
        del self.engine
        gc.collect()  # the old cache goes before the new one is sized
        try:
            self.engine = build_engine(loaded)
        except BaseException:
            self._closed = True
            _end(loaded.executor)
            raise
        self._info = self.engine.info()

    def restart(self) -> None:
        """Nothing starts it again."""
        raise EngineFailure("nothing starts this engine again")

    def submit(self, request: Request) -> None:
        """Queue a request; a refusal is reported by the next `poll`."""
        refused = self.engine.submit(request)
        if refused is not None:
            self._refused.append(refused)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or its sequence `index`; unknown ids are ignored. The next `poll` reports, so gauges fall."""
        self.engine.abort(request_id, index)
        self._aborted = True

    def pause(self, request_id: str) -> bool:
        """Never: nothing here keeps what came of a request."""
        return False

    def resume(self, request_id: str) -> None:
        """Nothing was paused."""

    @finished_before_the_end
    def poll(self, timeout: float) -> StepReport | None:
        """Run one step and report it; None when there is nothing to do."""
        outputs, self._refused = self._refused, []
        changes, self._changes = tuple(self._changes), []
        aborted, self._aborted = self._aborted, False
        if self.engine.has_work:
            outputs += self.engine.step()
        elif not (outputs or changes or aborted):
            return None
        return StepReport(outputs, self.engine.stats(), changes)

    def run(self, live: dict[str, Request]) -> Generator[tuple[int, Output], None, None]:
        """The outputs of the requests `live`, by their ids, each with its request's number. Whoever reads them takes
        away those that ended; what is left when he leaves is aborted.

        `BadRequest` during another run; the error of the first request that cannot be served, with its number.
        """
        if self._running:
            raise BadRequest("this LLM is in the middle of another call; finish that one, or use the server")
        self._running = True
        numbers = {request_id: number for number, request_id in enumerate(live)}
        try:
            for request in live.values():
                self.submit(request)
            while live:
                if self._closed:
                    raise ConfigError("this LLM was closed; make a new one")
                report = self.poll(0.0)
                if report is None:
                    raise EngineFailure(f"the engine stopped with {len(live)} requests unfinished")
                for output in report.outputs:
                    request_id = output.request_id
                    if request_id not in live:
                        continue  # it was under way when its sequence was aborted
                    if output.finish_reason in ("error", "abort"):
                        reason = output.error or output.finish_reason
                        error = told_error(output.error_kind, reason, output.error_param)
                        REFUSED.note(live[request_id].tenant, live[request_id].grammar, error)
                        message = f"prompt {numbers[request_id]}: {reason}"
                        raise told_error(output.error_kind, message, output.error_param)
                    yield numbers[request_id], output
        finally:
            self._running = False
            for request_id in () if self._closed else live:
                self.abort(request_id)

    def close(self) -> None:
        """Nothing outlives the object: a packed cache that is being written is finished first."""
        if not self._closed:
            self._closed = True
            self.engine.close()
            _end(self.engine.executor)


def _end(executor: Executor) -> None:
    executor.close()
    if executor.model.writing is not None:
        executor.model.writing.finish()
