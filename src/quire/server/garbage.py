"""When the interpreter looks for cycles and freed memory goes back to the system: seldom, and rather when idle."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from quire.core.machine import trim_heap

SHARE = 0.01
"""Of the time, at most, while requests are served."""
NEW = 700
"""Objects that are worth a search, as the interpreter has it."""
TRIM_EVERY = 2.0
"""Seconds between two times that freed memory is given back."""


class Garbage:
    """Searches at moments of its own, which stop everything, in place of the interpreter's.

    That looks at young objects all the time, and at all as soon as a quarter of them is new. With what was loaded left
    out (`uncollected`) it stopped 5,000 streams for 0.45 s with each of their tokens, and 50 ms many times between;
    probes waited as long. There is little to find: requests leave no circles (tests/test_garbage.py).
    """

    def __init__(self) -> None:
        self._next, self._next_trim, self._on, self._served = 0.0, 0.0, False, False

    @contextmanager
    def seldom(self) -> Iterator[None]:
        """Meanwhile there are no searches but those of `look`."""
        was, self._on = gc.isenabled(), True
        gc.disable()
        try:
            yield
        finally:
            self._on = False
            if was:
                gc.enable()

    def look(self, idle: bool) -> None:
        """Search if there may be something to find, and either it is time or nobody is disturbed.

        What large bodies leave goes back to the system when nobody is disturbed: the C library keeps it, 22 MiB after
        15 minutes of bodies of up to 500 KB.
        """
        began = time.monotonic()
        if self._on and gc.get_count()[0] >= NEW and (began >= self._next or idle):
            self._served = True
            gc.collect()
            now = time.monotonic()
            self._next = now + (now - began) / SHARE
        self._served |= not idle
        if self._on and idle and self._served and began >= self._next_trim:
            self._served, self._next_trim = False, began + TRIM_EVERY
            trim_heap()
