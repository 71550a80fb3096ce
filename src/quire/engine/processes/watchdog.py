"""When an engine that says nothing hangs: judged by how long its steps take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from quire.core.errors import EngineFailure
from quire.engine.stats import Stats

SLOW, LARGE = 20.0, 3.0
"""A step hangs after so many times the 99th percentile of steps, and of the time that the largest step is to take."""
CHANGE_SECONDS = 300.0
"""That a change of adapters may take."""

IMAGE_ROW_SECONDS = 0.5
"""That a row of an image may take to be encoded, of which steps without images say nothing."""


class Watchdog:
    """`hang`: seconds without a step after which an engine hangs, at least (0: never); `rows`: of the largest step."""

    def __init__(self, hang: float, rows: int) -> None:
        self._hang, self._rows = hang, rows
        self._heard, self._steps = time.monotonic(), deque[float](maxlen=512)
        self._row_seconds = 0.0

    def reset(self) -> None:
        """The engine is there, or has something new to do."""
        self._heard = time.monotonic()

    def learn(self, stats: Stats) -> None:
        """A step was reported."""
        self._heard = time.monotonic()
        if stats.step_tokens:
            self._steps.append(stats.step_seconds)
            row = stats.step_seconds / stats.step_tokens
            self._row_seconds = min(self._row_seconds or row, row)

    def check(
        self, busy: bool, changing: bool, kill: Callable[[], None], image_rows: Callable[[], int] = lambda: 0
    ) -> None:
        """`kill` it and raise `EngineFailure` once it hangs, with work or changes of adapters to do.

        The first step may take any time. `image_rows`: rows of the largest image that it may be encoding.
        """
        if not self._hang or not (busy or changing) or not self._steps:
            self._heard = time.monotonic()
            return
        slow = SLOW * sorted(self._steps)[int(0.99 * len(self._steps))]
        large = LARGE * self._row_seconds * self._rows
        limit = max(self._hang, slow, large, CHANGE_SECONDS if changing else 0.0)
        if time.monotonic() - self._heard > limit:
            limit += IMAGE_ROW_SECONDS * image_rows()
        if time.monotonic() - self._heard > limit:
            kill()
            raise EngineFailure(f"the engine hangs: no step ended for {limit:.0f} s")
