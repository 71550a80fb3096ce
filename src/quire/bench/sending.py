"""Send the turns of sessions when they are due, and note when each part of their answers came."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from quire.bench.http import Client, HttpFailure
from quire.bench.loads import ServeLoad
from quire.bench.records import Moments, Record
from quire.bench.sessions import RandomTokens, Session, SessionTurn, Workload
from quire.core.errors import QuireError

T = TypeVar("T")
NEAR = 0.001
"""Seconds: timers of uvloop count milliseconds, so the last one is waited for in turns of the loop."""


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class _Clock(msgspec.Struct):
    received: float
    told: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class _Report(msgspec.Struct):
    clock: _Clock | None = None


class _Event(msgspec.Struct):
    """What is read of an event of a stream; the rest of it is never made into objects."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    quire: _Report | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


class _Reader:
    """Takes the events of one answer into its record. `tokens`: the answer's, where the server tells them."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.tokens: list[int] = []

    def __call__(self, data: bytes, now: float) -> None:
        try:
            event = _DECODER.decode(data)
        except msgspec.DecodeError as error:
            raise HttpFailure(f"an event of the stream is malformed: {error}") from None
        record = self._record
        if event.error is not None:
            told = event.error
            raise HttpFailure(str(told.get("message", told) if isinstance(told, dict) else told))
        if event.choices:
            record.chunks.append(now)
            if event.choices[0].token_ids:
                self.tokens += event.choices[0].token_ids
        if (usage := event.usage) is not None:
            record.input_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                record.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        if event.quire is not None and (clock := event.quire.clock) is not None:
            record.moments = Moments(
                now, clock.received, clock.admitted, clock.first_token, clock.last_token, clock.told
            )


class Sender:
    """Sends what `load` asks for to one server. `model`: its name there; `tells_time`: its clock is asked for.

    `records` are those of all turns that were sent, in order of sending but for later turns.
    """

    def __init__(self, client: Client, load: ServeLoad, model: str, tells_time: bool) -> None:
        self._client, self._load = client, load
        self._stand_in = RandomTokens(load.seed, load.vocab_size)
        self._fields: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if load.ignore_eos else {}),
            **({"quire": {"clock": True}} if tells_time else {}),
        }
        self.records: list[Record] = []
        self.made_up_answers = 0
        self._done: Callable[[], None] = lambda: None

    async def warm(self, workload: Workload) -> None:
        """One request after the other, of which nothing is kept."""
        for number, session in enumerate(workload.warmup):
            turn = session.turns[0]
            await self._send(turn.new(), turn, Record(intended=0.0), f"warmup-{number}", False)

    async def go(self, workload: Workload, on_done: Callable[[], None]) -> float:
        """Send all sessions: seconds from the start to the last answer. `on_done` is called after each turn."""
        self._done = on_done
        limit = asyncio.Semaphore(self._load.max_concurrency or len(workload.sessions))
        with undisturbed():
            start = time.perf_counter()
            async with asyncio.TaskGroup() as running:
                for number, session in enumerate(workload.sessions):
                    first = session.turns[0].new()  # made before it is due
                    record = Record(start + session.due)
                    await until(record.intended)
                    if limit.locked():
                        await limit.acquire()
                        record.ready = time.perf_counter()
                    else:
                        await limit.acquire()
                    task = running.create_task(self._converse(number, session, first, record))
                    task.add_done_callback(lambda _: limit.release())
                    await asyncio.sleep(0)  # let it go before the next is made
            return time.perf_counter() - start

    async def _converse(self, number: int, session: Session, said: list[int], record: Record) -> None:
        """The turns of a session one after another; one that fails ends it."""
        several = len(session.turns) > 1
        for at, turn in enumerate(session.turns):
            if at:
                due = time.perf_counter() + turn.think
                said += turn.new()
                await until(due)
                record = Record(intended=due, turn=at)
            self.records.append(record)
            answer = await self._send(said, turn, record, f"bench-{number}-{at}", several)
            self._done()
            if record.error is not None:
                return
            if several and len(answer) != record.output_tokens:
                self.made_up_answers += 1
                answer = self._stand_in.answer(number, at, record.output_tokens)
            said += answer

    async def _send(self, prompt: list[int], turn: SessionTurn, record: Record, name: str, ids: bool) -> list[int]:
        """One streamed completion; what goes wrong is noted in the record. The answer's tokens, if `ids` are told."""
        body = {**self._fields, "prompt": prompt, "max_tokens": turn.output_tokens}
        if ids:
            body["return_token_ids"] = True
        content, reader = msgspec.json.encode(body), _Reader(record)
        record.sent = time.perf_counter()
        try:
            await self._client.stream("/v1/completions", content, reader, name)
        except QuireError as error:
            record.error = f"{type(error).__name__}: {error}"
        if not record.output_tokens:  # a server that tells no usage
            record.input_tokens, record.output_tokens = len(prompt), len(record.chunks)
        return reader.tokens


async def until(due: float) -> None:
    """Return when `time.perf_counter` is `due`, within tens of microseconds where the loop is free."""
    while (left := due - time.perf_counter()) > 0:
        await asyncio.sleep(left - NEAR if left > 2 * NEAR else 0)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run without the garbage collector, whose full passes over many records take tens of milliseconds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def on_loop(job: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, on uvloop where there is one."""
    try:
        import uvloop

        made = uvloop.new_event_loop
    except ImportError:  # Windows
        made = None
    with asyncio.Runner(loop_factory=made) as runner:
        return runner.run(job)
