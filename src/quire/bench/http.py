"""A small HTTP/1.1 client: JSON in, JSON or server-sent events out, each part with the time at which it came.

Within `async with client` connections are kept alive; elsewhere each request has one of its own, closed behind it.
Parts go from the socket to whoever reads them without a task between (asyncio's protocols, parsed by httptools): one
core drives thousands of streams a second, and what a part is stamped with is when the socket had it.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NamedTuple, Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from quire.core.errors import ConfigError, QuireError, Unavailable

MAX_BODY = 64 << 20
DONE = b"[DONE]"
CONNECT_SECONDS = 10.0

Take = Callable[[bytes, float], None]
"""Called with bytes, and the seconds of `time.perf_counter` at which they were read."""


class ClientTimeouts(NamedTuple):
    """Seconds that a client waits: for a connection, for the first byte of an answer, from each to the next, and for
    all of it."""

    connect: float = CONNECT_SECONDS
    first: float = 600.0
    idle: float = 600.0
    whole: float = 3600.0

    @classmethod
    def of(cls, seconds: float) -> ClientTimeouts:
        """Where nothing may take longer than `seconds` but a whole answer, which may take six times as long."""
        return cls(min(CONNECT_SECONDS, seconds), seconds, seconds, 6 * seconds)


PATIENT = ClientTimeouts()
UNAUTHORIZED = 401


class HttpFailure(QuireError):
    """The server answered with an error, or with what is none of HTTP's."""


class _Stale(Exception):
    """A connection that was kept had been closed by the server before it answered anything."""


class _Connection(asyncio.Protocol):
    """One connection: an answer at a time. `clean`: it can take another request."""

    def __init__(self, patience: ClientTimeouts) -> None:
        self._patience = patience
        self._watch: asyncio.TimerHandle | None = None
        self._sent = 0.0
        self.clean = self.used = False
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[None] | None = None
        self._parser: Any = None
        self._take: Take = lambda _, __: None
        self._now = 0.0
        self._lost = self._ends_by_closing = False
        self._error: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it is open."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        self.clean = True

    async def exchange(self, request: bytes, take: Take) -> None:
        """Send `request`; its answer's parts go to `take`. `HttpFailure` where that is no 200, or `_Stale`."""
        if self._lost:
            raise _Stale
        assert self._transport is not None
        self.clean = False
        self._take, self._parser = take, httptools.HttpResponseParser(self)
        self._now, self._ends_by_closing, self._error = 0.0, True, []
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        self._sent = time.perf_counter()
        self._look()
        try:
            await self._answer
        finally:
            self.used = True
            if self._watch is not None:
                self._watch.cancel()

    def _look(self) -> None:
        """End an answer that is late; else look again when it would be."""
        bounds = self._patience
        told, since, seconds = ("no byte of an answer came", self._sent, bounds.first)
        if self._now:
            told, since, seconds = ("nothing more of the answer came", self._now, bounds.idle)
        now = time.perf_counter()
        if now >= self._sent + bounds.whole:
            told, since, seconds = ("the answer was not whole", self._sent, bounds.whole)
        left = min(since + seconds, self._sent + bounds.whole) - now
        if left > 0:
            self._watch = asyncio.get_running_loop().call_later(left, self._look)
            return
        self._fail(HttpFailure(f"timeout: {told} within {seconds:g} s"))
        self.close()

    def close(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came."""
        self._now = time.perf_counter()
        if self._answer is None or self._answer.done():  # nothing was asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            told = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            self._fail(told if isinstance(told, QuireError) else HttpFailure(f"the response is malformed: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: nothing more will come."""
        self._lost, self.clean = True, False
        if not self._now and self.used:
            self._fail(_Stale())
        elif self._now and self._ends_by_closing and self._parser.get_status_code() and error is None:
            self.on_message_complete()
        else:
            reason = str(error) if error else "it was closed before its end"
            self._fail(HttpFailure(f"the connection broke or the response is malformed: {reason}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: one header."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_by_closing = False

    def on_body(self, part: bytes) -> None:
        """httptools: a part of the body, whatever it was cut into."""
        if self._parser.get_status_code() == 200:
            self._take(part, self._now)
        elif sum(map(len, self._error)) < MAX_BODY:
            self._error.append(part)

    def on_message_complete(self) -> None:
        """httptools: the answer is whole."""
        if self._answer is None or self._answer.done():  # an answer too many
            self.clean = False
            self.close()
            return
        status = self._parser.get_status_code()
        self.clean = not self._lost and self._parser.should_keep_alive() and not self._ends_by_closing
        if status != 200:
            key = "; give --api-key KEY" if status == UNAUTHORIZED else ""
            self._fail(HttpFailure(f"HTTP {status}: {_message(b''.join(self._error))}{key}"))
        else:
            self._answer.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


def _message(text: bytes) -> str:
    """What an answer with an error says."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200].decode(errors="replace")


class Events:
    """Parts of a body -> the data of its server-sent events, each with its time; `done` after `[DONE]`."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._buffer = b""
        self.done = False

    def __call__(self, part: bytes, now: float) -> None:
        """Take a part."""
        buffer = self._buffer + part
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *events, self._buffer = buffer.split(b"\n\n")
        if len(self._buffer) > MAX_BODY:
            raise HttpFailure(f"an event is longer than {MAX_BODY} bytes")
        for event in events:
            data = b"".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if data == DONE:
                self.done = True
            elif data and not self.done:
                self._take(data, now)


class Client:
    """Requests to one server, `base_url` being like http://127.0.0.1:8000."""

    def __init__(self, base_url: str, api_key: str | None = None, patience: ClientTimeouts = PATIENT) -> None:
        self._patience = patience
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {base_url!r} is not like http://127.0.0.1:8000", param="base_url")
        self.host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._keeps = False
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Self:
        self._keeps = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._keeps = False
        while self._idle:
            self._idle.pop().close()
        await asyncio.sleep(0)  # the loop closes their sockets

    async def get(self, path: str) -> Any:
        """The JSON at `path`."""
        return await self._json("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that `body` is answered with."""
        return await self._json("POST", path, msgspec.json.encode(body))

    async def _json(self, method: str, path: str, content: bytes | None) -> Any:
        parts: list[bytes] = []
        size = 0

        def take(part: bytes, _: float) -> None:
            nonlocal size
            size += len(part)
            if size > MAX_BODY:
                raise HttpFailure(f"the answer is longer than {MAX_BODY} bytes")
            parts.append(part)

        await self.request(method, path, content, take)
        try:
            return json.loads(b"".join(parts))
        except ValueError as error:
            raise HttpFailure(f"the response is malformed: {error}") from None

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The JSON objects of a stream of server-sent events, up to `[DONE]`. An error event raises `HttpFailure`."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        job = asyncio.create_task(self.stream(path, msgspec.json.encode(body), lambda data, _: queue.put_nowait(data)))
        job.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (data := await queue.get()) is not None:
                try:
                    value = json.loads(data)
                except ValueError as error:
                    raise HttpFailure(f"the connection broke or the response is malformed: {error}") from None
                if "error" in value:
                    raise HttpFailure(str(value["error"].get("message")))
                yield value
            await job
        finally:
            job.cancel()

    async def stream(self, path: str, content: bytes, take: Take, request_id: str = "") -> None:
        """POST `content` (JSON); the data of each event of the answer goes to `take` as it comes, up to `[DONE]`."""
        events = Events(take)
        await self.request("POST", path, content, events, request_id)
        if not events.done:
            raise HttpFailure("the stream ended without [DONE]")

    async def request(self, method: str, path: str, content: bytes | None, take: Take, request_id: str = "") -> None:
        """Send a request; parts of the body of its answer go to `take`. A kept connection that had died is renewed."""
        request = self._head(method, path, content, request_id) + (content or b"")
        while True:
            connection = self._idle.pop() if self._idle else await self._connect()
            try:
                await connection.exchange(request, take)
                return
            except _Stale:
                continue
            finally:
                if connection.clean and self._keeps:
                    self._idle.append(connection)
                else:
                    connection.close()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._patience.connect):
                make = partial(_Connection, self._patience)
                _, made = await loop.create_connection(make, self.host, self._port, ssl=self._tls)
        except TimeoutError:
            told = f"{self.host}:{self._port}: timeout: no connection within {self._patience.connect:g} s"
            raise Unavailable(f"{told}; is the server up?") from None
        except OSError as error:
            raise Unavailable(f"{self.host}:{self._port}: {error.strerror or error}; is the server up?") from None
        return made

    def _head(self, method: str, path: str, content: bytes | None, request_id: str) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (
            f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {host}:{self._port}\r\n{self._key}"
            + ("" if self._keeps else "Connection: close\r\n")
            + (f"X-Request-Id: {request_id}\r\n" if request_id else "")
            + (f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n" if content is not None else "")
            + "\r\n"
        ).encode()
