"""Server-sent events: the only hot path of the server, one `send` per engine step and stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.core.errors import QuireError
from quire.server.http.dialects import Dialect
from quire.server.http.disconnect import ClientGone, cancel_on_disconnect
from quire.server.http.json_parts import PART, encode
from quire.server.text_generation.generation import Generated, Piece

_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
_encoder = msgspec.json.Encoder()


class StreamedReply(Protocol):
    """A reply that is streamed: `events` turns pieces into bytes, `tail` follows the last, `failed` ends it."""

    generation: Generated

    @property
    def dialect(self) -> Dialect:
        """How it lies on the wire."""

    async def events(self, pieces: list[Piece]) -> bytes:
        """The messages of one step."""

    async def check(self) -> None:
        """Look at what was said, when it is whole."""

    def tail(self) -> bytes:
        """What follows those of the last."""

    def failed(self, error: QuireError) -> bytes:
        """The end of a stream that failed."""


def event(value: msgspec.Struct, large: bool = False) -> bytes:
    """One event that carries a JSON value; a `large` one is encoded in pieces."""
    return b"".join((b"data: ", *(encode(value) if large else (_encoder.encode(value),)), b"\n\n"))


class EventStream(Response):
    """Streams a generation as its `answer` says.

    The headers wait for the first tokens, so that a failure before them has its own status; one after them is an
    `error` event and the end of the stream without [DONE]. Where nothing is to be said for `ping` seconds, headers and
    the dialect's ping are sent: proxies cut silent connections, and only what is sent finds out that a client has
    vanished. A client that leaves aborts its requests.
    """

    def __init__(self, answer: StreamedReply, ping: float) -> None:
        """`ping` 0: never."""
        super().__init__(status_code=200)
        self._answer = answer
        self._ping = ping
        self._started, self._silent = False, True
        self._whole = asyncio.Lock()  # a comment within an event would end it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (ASGI)."""
        answer = self._answer
        try:
            async with cancel_on_disconnect(receive), self._pings(send):
                async for pieces in answer.generation.pieces():
                    data = await answer.events(pieces)
                    if not data:
                        continue
                    self._silent = False
                    await self._send(send, data)
                await answer.check()
            end = answer.tail() + answer.dialect.done
        except ClientGone:
            return
        except QuireError as error:
            if not self._started:
                raise
            end = answer.failed(error)
        except Exception:
            if self._started:
                end = answer.failed(QuireError("internal error; the request id is in the x-request-id header"))
                await send({"type": "http.response.body", "body": end, "more_body": False})
            raise
        finally:
            answer.generation.close()
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        async with self._whole:
            if not self._started:
                self._started = True
                kind = (b"content-type", self._answer.dialect.media_type)
                await send({"type": "http.response.start", "status": 200, "headers": [kind, *_HEADERS]})
            for at in range(0, len(data), PART):
                await send({"type": "http.response.body", "body": data[at : at + PART], "more_body": True})

    @contextlib.asynccontextmanager
    async def _pings(self, send: Send) -> AsyncIterator[None]:
        """Meanwhile, a comment after each `ping` seconds in which no event was sent."""

        async def watch() -> None:
            while True:
                await asyncio.sleep(self._ping)
                if self._silent:
                    await self._send(send, self._answer.dialect.ping)
                self._silent = True

        if not self._ping:
            yield
            return
        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
