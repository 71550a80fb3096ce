"""What one client waits for: outputs as they come, merged while it does not read, and no more than it can keep.
See docs/design/server.md."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from quire.core.errors import QuireError, told_error
from quire.core.request import FinishReason, Output, Request
from quire.engine.frontend.engine_metrics import EngineMetrics
from quire.engine.frontend.request_times import SequenceClock
from quire.text.structured.refused_grammars import REFUSED

AT_ONCE = 16
"""Streams that write, or requests that begin, in one turn: some 2 to 10 ms of Python."""
TURN_SECONDS = 2e-3
"""After so long a turn ends before that: what engines report takes its time here, not in what is woken."""


class CallQueue:
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
        end = time.monotonic() + TURN_SECONDS
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


UNREAD = 64 << 10
"""Bytes of a request's outputs that wait for a reader, about, before it is paused: going on again costs a step."""
TOKEN_BYTES, SCORE_BYTES = 36, 120
"""Of a token, and of a token's log-probability, as Python objects."""

Key = tuple[str, int]


class StreamOwner(Protocol):
    """What a stream needs of the engine's edge."""

    metrics: EngineMetrics
    turns: CallQueue

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Nobody waits for a request, or one of its sequences."""

    def release(self, request: Request, abort: bool) -> None:
        """A request's last sequence ended."""

    def pause(self, request_id: str) -> bool:
        """Whether nothing more comes of a request until `resume`."""

    def resume(self, request_id: str) -> None:
        """Go on with a request."""


def _size(output: Output) -> int:
    """Bytes of memory, about."""
    return TOKEN_BYTES * len(output.tokens) + SCORE_BYTES * sum(len(each.top) + 1 for each in output.logprobs)


class OutputStream:
    """The outputs of a group of requests one client waits for.

    Unread outputs merge, and a request of which `UNREAD` bytes wait is paused until they are read: a reader that stalls
    costs little memory and no steps. Lives on the event loop. `close` must be called (it is idempotent); it aborts
    whatever has not finished.
    """

    def __init__(self, engine: StreamOwner, requests: Sequence[Request]) -> None:
        self._engine = engine
        self._requests = {r.id: r for r in requests}
        self._clocks = {(r.id, i): SequenceClock(r.arrival) for r in requests for i in range(r.params.n)}
        self._live = set(self._clocks)
        self._unfinished: set[str] = set()  # requests the engine still works on though the edge is done with them
        self._pending: dict[Key, Output] = {}
        self._unread: dict[str, int] = {}  # bytes, of requests of which more came than was read
        self._paused: set[str] = set()
        self._error: QuireError | None = None
        self._wake = asyncio.Event()
        self._called = False  # it has a turn before it

    def begin(self, request: Request, submit: Callable[[Request], None]) -> None:
        """Give a request to the engine later than the first ones, unless it has ended meanwhile."""
        if any((request.id, index) in self._live for index in range(request.params.n)):
            try:
                submit(request)
            except QuireError as error:
                self.fail(error)

    async def next(self) -> list[Output]:
        """Everything new since the last call, at most one output per sequence; empty once all sequences have ended.

        Raises the `QuireError` that ended the group, after the tokens that came before it.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._live:
                return []
            self._wake.clear()
            await self._wake.wait()
        outputs = list(self._pending.values())
        self._pending.clear()
        self._unread.clear()
        while self._paused:
            self._engine.resume(self._paused.pop())
        return outputs

    def stop(self, request_id: str, index: int) -> None:
        """The edge ended this sequence (a stop string): drop what still comes, and let the engine free its blocks."""
        key = (request_id, index)
        if key in self._live:
            self._pending.pop(key, None)
            self._cut(key, "stop")
            self._engine.abort(request_id, index)
            self._end(key, in_engine=False)

    def put(self, output: Output, now: float) -> None:
        """Take an output from the engine."""
        key = (output.request_id, output.index)
        if key not in self._live:
            return
        clock = self._clocks[key]
        if output.tokens:
            self._engine.metrics.tokens(clock, len(output.tokens), now)
        clock.note(output)
        reason = output.finish_reason
        if reason is not None:
            self._engine.metrics.sequence_end(clock, reason)
            self._end(key, in_engine=False)
        if reason in ("error", "abort"):
            message = output.error or f"the engine ended request {output.request_id} ({reason})"
            error = told_error(output.error_kind, message, output.error_param)
            request = self._requests[output.request_id]
            REFUSED.note(request.tenant, request.grammar, error)
            self.fail(error)
        elif key in self._pending:
            self._pending[key].merge(output)
            self._pause_if_full(output)
        else:
            self._pending[key] = output
        self._call()

    def fail(self, error: QuireError) -> None:
        """End the group with an error: what it still runs in the engine is aborted."""
        if self._error is None:
            self._error = error
        for key in list(self._live):
            self._cut(key, "error")
            self._end(key, in_engine=True)
        self._call()

    def close(self) -> None:
        """The reader left or is done."""
        for key in list(self._live):
            self._cut(key, "abort")
            self._end(key, in_engine=True)
        self._wake.set()

    def clocks(self, request_id: str) -> list[SequenceClock]:
        """What happened to the sequences of a request so far, in order."""
        return [self._clocks[request_id, index] for index in range(self._requests[request_id].params.n)]

    def _pause_if_full(self, output: Output) -> None:
        """Count what was merged."""
        name = output.request_id
        self._unread[name] = self._unread.get(name, 0) + _size(output)
        if self._unread[name] > UNREAD and name not in self._paused and self._engine.pause(name):
            self._paused.add(name)

    def _call(self) -> None:
        """Let the reader go on in its turn."""
        if not self._called:
            self._called = True
            self._engine.turns.later(self._go_on)

    def _go_on(self) -> None:
        self._called = False
        self._wake.set()

    def _cut(self, key: Key, reason: FinishReason) -> None:
        self._clocks[key].cut(reason)
        self._engine.metrics.sequence_end(self._clocks[key], reason)

    def _end(self, key: Key, in_engine: bool) -> None:
        self._live.discard(key)
        request = self._requests[key[0]]
        if in_engine:
            self._unfinished.add(request.id)
        if not any((request.id, i) in self._live for i in range(request.params.n)):
            self._engine.release(request, abort=request.id in self._unfinished)
