"""uvicorn's HTTP/1.1 protocol with limits that must hold before, between and beside requests."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from quire.core.errors import BadRequest
from quire.server.http.errors import HttpError, openai_error_body
from quire.server.http.gateway import MAX_HEADER_BYTES, MAX_HEADERS

MAX_UNREAD_BODY = 64 << 20  # bytes thrown away after an early refusal before the connection is cut
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_SECONDS = (0.02, 1.0)
"""Between the first two probes, and at most; each pause is twice the last."""


class _Exit:
    """The transport as one answer sees it: `close` lets a body that still arrives end first.

    Closed at once, the system would reset the connection, and the client might lose the answer it has not read.
    """

    def __init__(self, protocol: LimitedProtocol, transport: asyncio.Transport) -> None:
        self._protocol = protocol
        self.write, self.is_closing = transport.write, transport.is_closing

    def close(self) -> None:
        """Close after the body, or now."""
        self._protocol.leave()


class LimitedProtocol(HttpToolsProtocol):
    """Refuses endless headers (431) while they arrive, slow ones (408), and cuts readers that stopped reading.

    A client that was answered before its body was whole has `late_body_timeout` seconds to read that and end the body.
    What is no HTTP is refused after the answers to what came before it. One that ends its sending half is answered if
    it still reads. Whether it does or has left, only writing tells, so an answer that has not begun is preceded by
    interim ones (100); over TLS and for HTTP/1.0, which have no such means, it counts as gone.
    """

    header_timeout = 15.0
    write_timeout = 30.0
    late_body_timeout = 5.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._in_body = False
        self._head_bytes = 0
        self._unread = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._unanswered = 0
        self._leaving = self._half_closed = False
        self._refusal: BadRequest | HttpError | None = None
        self._fed = self._left = b""
        self._again = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected and must send its headers now."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_USER_TIMEOUT") and sock.family in (socket.AF_INET, socket.AF_INET6):
            # A client whose machine has vanished confirms nothing: Linux waits for it for a quarter of an hour.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self.write_timeout))
            # Beside the 64 KiB that wait here: else the system takes megabytes for a reader that reads nothing.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, HIGH_WATER_LIMIT)
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and with it the timers.

        Its parts refer to each other in a circle, which is cut: a refusal had 26 objects in it, a stream 62, and where
        thousands end in a second a search for them takes a tenth of one.
        """
        self._stop_timers()
        self._unset_keepalive_if_required()  # uvicorn leaves it running after a reset, and it holds all of this
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]
        self.pipeline.clear()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. True keeps the connection for the answers to what it has sent."""
        old = self.scope is not None and self.scope["http_version"] == "1.0"
        if not self._unanswered or self._in_body or old or self.transport.get_extra_info("ssl_object") is not None:
            return False
        self._half_closed = True
        self._probe(PROBE_SECONDS[0])
        return True

    def data_received(self, data: bytes) -> None:
        """Bytes arrived; those of headers are counted as they come, because the parser keeps unfinished ones."""
        if self._refusal is not None:
            return
        if self._in_head:
            self._head_bytes += len(data)
        self._left = data
        while self._left and not self.transport.is_closing():
            self._fed, self._left = self._left, b""
            super().data_received(self._fed)
        self._fed = b""
        if self.cycle is not None and self.cycle.response_complete and not self._in_head and not self._in_body:
            self._keep_idle()
        if self._in_head and self._head_bytes > MAX_HEADER_BYTES:
            self._refuse(HttpError(431, "the request's headers are too large", code="headers_too_large"))

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self._again:
            return
        super().on_message_begin()
        if not self._in_head:
            self._start_head()

    def on_url(self, url: bytes) -> None:
        """A part of what is asked for."""
        if not self._again:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; an exception here ends the connection."""
        if self._again:
            return
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse(HttpError(431, f"more than {MAX_HEADERS} headers", code="headers_too_large"))
            raise httptools.HttpParserError("too many headers")

    def on_headers_complete(self) -> None:
        """The request's head is whole."""
        if self._again:
            return
        if self.parser.get_method() == b"CONNECT":
            self._refuse(HttpError(405, "CONNECT: this server is no proxy", code="method_not_allowed"))
            raise httptools.HttpParserError("no proxy")
        super().on_headers_complete()  # it raises for what is no path, as CONNECT has none: no request has begun then
        self._in_head, self._in_body = False, True
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._unanswered += 1
        self.cycle.transport = _Exit(self, self.transport)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """A piece of the body; after an early refusal it is thrown away, but not without end."""
        if self.cycle is not None and self.cycle.response_complete:
            self._unread += len(body)
            if self._unread > MAX_UNREAD_BODY:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self.parser.should_upgrade() and _has_body(self.headers):
            return  # the parser takes what follows for another protocol
        self._in_body = False
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()
        if self._leaving:
            self.transport.close()

    def on_response_complete(self) -> None:
        """A request was answered, perhaps before its body was whole."""
        super().on_response_complete()
        self._unanswered -= 1
        if self._unanswered or self.transport.is_closing():
            return
        if self._refusal is not None:
            self._refuse(self._refusal)
        elif self._half_closed:
            self.transport.close()
        elif self._in_body:
            self._body_timer = self.loop.call_later(self.late_body_timeout, self.transport.close)

    def leave(self) -> None:
        """The last answer is written: close, once the body that it answers has ended."""
        if self._in_body and self.cycle.response_complete:
            self._leaving = True
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """The client reads slower than we write: it has `write_timeout` seconds to go on."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """The client caught up."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(BadRequest(f"not a valid HTTP request: {msg}"))

    def _unsupported_upgrade_warning(self) -> None:
        """Go on in HTTP/1.1 where a client would change to another protocol, as clients of HTTP/2 ask with any request.

        uvicorn calls this where its parser has stopped, behind the head. A new one, told of the body alone, goes on.
        """
        stopped = sys.exception()
        assert isinstance(stopped, httptools.HttpParserUpgrade)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        if _has_body(self.headers):
            told = (b"content-length", b"transfer-encoding")
            lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] in told]
            self._again = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(lines))
            self._again = False
        self._left = self._fed[stopped.args[0] :]

    def _start_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.header_timeout, self._head_expired)

    def _head_expired(self) -> None:
        self._head_timer = None
        if self._head_bytes:
            self._refuse(HttpError(408, "the request's headers did not arrive in time", code="request_timeout"))
        elif not self.transport.is_closing():
            self.transport.close()

    def _keep_idle(self) -> None:
        """Wait for the next request as long as after any answer: bytes that came since then ended that wait."""
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            handler = self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, handler)

    def _refuse(self, error: BadRequest | HttpError) -> None:
        """Answer in the place of the request that is being read, after those before it, and close."""
        if self.transport.is_closing() or (self._refusal is not None and self._unanswered):
            return
        answered = self._in_body and not self._drop()
        if self._unanswered and not answered:
            self._refusal = error
            return
        self._stop_timers()
        if not answered:
            body = openai_error_body(error) + b"\n"
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def _drop(self) -> bool:
        """Forget the request whose body is being read; False where its answer has begun."""
        self._in_body, cycle = False, self.cycle
        if cycle.response_started:
            return False
        self._unanswered -= 1
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
        cycle.disconnected = True  # nothing that it still says is sent
        cycle.message_event.set()
        return True

    def _probe(self, seconds: float) -> None:
        """Write what tells whether anybody still reads. Of a stream its events do."""
        if self.transport.is_closing() or not self._unanswered:
            return
        if not self.cycle.response_started and not self.pipeline:
            self.transport.write(PROBE)
        self._probe_timer = self.loop.call_later(seconds, self._probe, min(2 * seconds, PROBE_SECONDS[1]))

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer, self._body_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._write_timer = self._body_timer = self._probe_timer = None


def _has_body(headers: list[tuple[bytes, bytes]]) -> bool:
    found = dict(headers)
    return b"transfer-encoding" in found or found.get(b"content-length", b"0").strip(b"0") != b""
