"""When an engine that says nothing hangs: judged by how long its steps take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from quire.core.errors import EngineFailure
from quire.engine.stats import Stats

SLOW, LARGE = 20.0, 3.0
"""A step hangs after so many times the 99th percentile of steps, and of the time that the largest step is to take."""
CHANGE_SECONDS = 300.0
"""That a change of adapters may take."""

IMAGE_ROW_SECONDS = 0.5
"""That a row of an image may take to be encoded, of which steps without images say nothing."""


class Watched(Protocol):
    """An engine that may hang."""

    def kill(self) -> None:
        """End it now."""

    def cpu_wait(self) -> float:
        """Seconds for which it wanted a processor and had none, so far."""


class Watchdog:
    """`hang`: seconds without a step after which an engine hangs, at least (0: never); `rows`: of the largest step.

    Time in which other processes had the processors is not counted: under ninefold load a second of work takes ten.
    """

    def __init__(self, hang: float, rows: int) -> None:
        self._hang, self._rows = hang, rows
        self._heard, self._steps = time.monotonic(), deque[float](maxlen=512)
        self._row_seconds = 0.0
        self._waited: float | None = None  # of the engine, when it was first looked at since it was heard of

    def reset(self) -> None:
        """The engine is there, or has something new to do."""
        self._heard, self._waited = time.monotonic(), None

    def learn(self, stats: Stats) -> None:
        """A step was reported."""
        self.reset()
        if stats.step_tokens:
            self._steps.append(stats.step_seconds)
            row = stats.step_seconds / stats.step_tokens
            self._row_seconds = min(self._row_seconds or row, row)

    def check(self, busy: bool, changing: bool, engine: Watched, image_rows: Callable[[], int] = lambda: 0) -> None:
        """Kill `engine` and raise `EngineFailure` once it hangs, with work or changes of adapters to do.

        The first step may take any time. `image_rows`: rows of the largest image that it may be encoding.
        """
        if not self._hang or not (busy or changing) or not self._steps:
            self.reset()
            return
        if self._waited is None:
            self._waited = engine.cpu_wait()
        slow = SLOW * sorted(self._steps)[int(0.99 * len(self._steps))]
        large = LARGE * self._row_seconds * self._rows
        limit = max(self._hang, slow, large, CHANGE_SECONDS if changing else 0.0)
        if time.monotonic() - self._heard > limit:
            limit += IMAGE_ROW_SECONDS * image_rows() + max(0.0, engine.cpu_wait() - self._waited)
        if time.monotonic() - self._heard > limit:
            engine.kill()
            raise EngineFailure(f"the engine hangs: no step ended for {limit:.0f} s")
