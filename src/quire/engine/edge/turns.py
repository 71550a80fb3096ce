"""Turns of the event loop: how much of what waits goes on in each, so that whoever does not wait is answered soon."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial

AT_ONCE = 16
"""Streams that write, or requests that begin, in one turn: some 2 to 10 ms of Python."""
SECONDS = 2e-3
"""After so long a turn ends before that: what engines report takes its time here, not in what is woken."""


class Turns:
    """Calls what it is given in that order, `AT_ONCE` in a turn of the loop. Belongs to the event loop.

    An event loop runs all that is ready before it looks at sockets again: with thousands of streams that is seconds,
    in which no probe is answered. Between turns it looks.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._turning = False

    def later(self, call: Callable[[], object]) -> None:
        """Call it behind all that came before."""
        self._waiting.append(call)
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    async def mine(self) -> None:
        """Wait for one's turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.later(partial(_let, turn))
        await turn

    def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        end = time.monotonic() + SECONDS
        for _ in range(min(AT_ONCE, len(self._waiting))):
            try:
                self._waiting.popleft()()
            except Exception as error:
                loop.call_exception_handler({"message": "a turn failed", "exception": error})
            if time.monotonic() > end:
                break
        self._turning = bool(self._waiting)
        if self._turning:
            loop.call_soon(self._turn)


def _let(waiting: asyncio.Future[None]) -> None:
    """Whoever waits may go on, unless it has given up."""
    if not waiting.done():
        waiting.set_result(None)
