"""What the end of the interpreter, and a fork, do to a thread that is in native code.

Python ends a daemon thread where it next takes the interpreter's lock. Within native code that is in a destructor, from
which no thread may leave: the whole process would end by SIGABRT.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
WAIT_SECONDS = 0.001


class _Calls:
    """Calls of all threads: the end waits for those that are under way, and threads that come later end."""

    def __init__(self) -> None:
        self._inside: set[int] = set()
        self._last: int | None = None

    def run(self, call: Callable[[], T]) -> T:
        me = threading.get_ident()
        if me in self._inside:
            return call()
        self._inside.add(me)  # before the question, so that the end sees this thread or this thread sees the end
        try:
            if self._last not in (None, me):
                raise SystemExit  # ends the thread, as Python is about to
            return call()
        finally:
            self._inside.discard(me)

    def end(self) -> None:
        """From now on only this thread calls."""
        self._last = threading.get_ident()
        while self._inside - {self._last}:
            time.sleep(WAIT_SECONDS)

    def forget(self) -> None:
        """A fork took one thread along."""
        self._inside.clear()


_CALLS = _Calls()
atexit.register(_CALLS.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_CALLS.forget)


def finished_before_the_end(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, whose calls in other threads the interpreter's end waits for."""

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> T:
        return _CALLS.run(lambda: function(*args, **named))

    return call
