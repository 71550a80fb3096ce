"""Connections that are slow, broken or without end: what the protocol refuses, and when it closes.

T4, with test_content_type_encoding_and_size of test_server_refusals.py; tiny chunks: test_reliability_http.py.
"""

from __future__ import annotations

import gc
import re
import socket
import struct
import time
import weakref
from typing import Any

import pytest

from live_server import LiveServer, live, wait_until
from quire.server.http.connection import LimitedProtocol
from stub_engine import StubEngine


def raw(server: LiveServer, data: bytes, seconds: float = 5.0) -> str:
    """Send bytes, return what comes back until the server closes or a pause."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as sock:
        sock.sendall(data)
        got = b""
        try:
            while chunk := sock.recv(65536):
                got += chunk
        except (TimeoutError, ConnectionResetError):
            pass
        return got.decode()


def test_headers_are_limited_in_size_number_and_time() -> None:
    with live(header_timeout=0.3, keep_alive_timeout=1) as server:
        start = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
        assert raw(server, start + b"a: b\r\n" * 100 + b"\r\n").startswith("HTTP/1.1 431")
        assert raw(server, start + b"a: " + b"b" * 20_000).startswith("HTTP/1.1 431")
        assert raw(server, b"GET /" + b"a" * 40_000).startswith("HTTP/1.1 431")
        assert raw(server, start + b"a: " + b"b" * 17_000 + b"\r\n\r\n").startswith("HTTP/1.1 431")
        began = time.monotonic()
        assert raw(server, start).startswith("HTTP/1.1 408")
        assert raw(server, b"") == "", "a connection that says nothing is closed"
        assert time.monotonic() - began < 3
        both = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert raw(server, both).startswith("HTTP/1.1 400")
        assert raw(server, b"nonsense\r\n\r\n").startswith("HTTP/1.1 400")
        assert raw(server, start + b"\r\n").startswith("HTTP/1.1 200"), "the keep-alive timeout closes it"


def test_a_slow_body_is_a_408() -> None:
    with live(body_timeout=0.2, keep_alive_timeout=1) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        assert raw(server, head + b"Content-Length: 100\r\n\r\n{").startswith("HTTP/1.1 408")


def dribble(server: LiveServer, head: bytes, seconds: float) -> tuple[str, float]:
    """Send `head` and then a byte now and then: what comes back, and how long the server listened."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5.0) as sock:
        sock.sendall(head)
        got, began = b"", time.monotonic()
        sock.settimeout(0.05)
        while time.monotonic() - began < seconds:
            try:
                sock.sendall(b"a")
                chunk = sock.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                break
            got += chunk
            if not chunk:
                break
        return got.decode(), time.monotonic() - began


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n", 401),
        (b"POST /ping HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n400\r\n", 200),
        (b"GET /livez HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 1000\r\n\r\n", 421),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
         b"Authorization: Bearer key\r\nContent-Length: 1000\r\n\r\n", 408),
    ],
    ids=("401", "200", "421", "408"),
)  # fmt: skip
def test_a_body_that_nobody_waits_for_must_end_soon(head: bytes, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "late_body_timeout", 0.4)
    with live(body_timeout=0.2, api_key=("key",)) as server:
        got, seconds = dribble(server, head, 4.0)
        assert got.startswith(f"HTTP/1.1 {status}") and got.count("HTTP/1.1") == 1
        assert 0.3 < seconds < 3.0


def whole_reply(sock: socket.socket) -> bytes:
    """The next reply, whose body may come behind its head."""
    got = b""
    while (length := re.search(rb"\r\ncontent-length: (\d+)\r\n(?:.*\r\n)*?\r\n", got)) is None or len(got) < (
        length.end() + int(length[1])
    ):
        chunk = sock.recv(65536)
        assert chunk, got
        got += chunk
    return got


def test_a_connection_goes_on_after_a_late_body_and_is_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "late_body_timeout", 0.5)
    post = b"POST /ping HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n"
    get = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
    with live(keep_alive_timeout=1) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5.0) as sock:
            sock.sendall(post + b"a")
            assert whole_reply(sock).startswith(b"HTTP/1.1 200")
            sock.sendall(b"bcd")
            time.sleep(0.7)
            sock.sendall(get + b"\r\n")
            assert whole_reply(sock).startswith(b"HTTP/1.1 200")
            sock.sendall(post + b"a")
            assert whole_reply(sock).startswith(b"HTTP/1.1 200")
            sock.sendall(b"bcd")
            assert sock.recv(65536) == b"", "the keep-alive timeout closes it"
        assert raw(server, post + b"abcd" + get + b"\r\n").count("HTTP/1.1 200") == 2
        upgrade = b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
        assert raw(server, get + upgrade).count("HTTP/1.1 200") == 1


@pytest.mark.parametrize("second", ["localhost", "evil.example"])
def test_a_second_host_header_is_refused(second: str) -> None:
    """A proxy before this server may have gone by the other one."""
    with live() as server:
        reply = raw(server, f"GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: {second}\r\n\r\n".encode(), 0.5)
        assert reply.startswith("HTTP/1.1 400") and '"param":"host"' in reply


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "a", "max_tokens": 4, "stream": %s}'


def post(stream: bool = False) -> bytes:
    """A whole request."""
    body = BODY % (b"true" if stream else b"false")
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{}\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 3\r\nContent-Length: 5\r\n\r\n{}",
    ],
    ids=("no size", "wrong size", "gzip", "chunked first", "two lengths"),
)
def test_a_body_that_cannot_be_read_is_a_400(data: bytes) -> None:
    with live() as server:
        got = raw(server, data, 2.0)
        assert got.startswith("HTTP/1.1 400") and got.count("HTTP/1.1") == 1 and "not a valid HTTP request" in got
        wait_until(lambda: server.state.active == 0)
        assert server.engine.in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
def test_garbage_after_a_request_is_refused_after_its_answer(stream: bool) -> None:
    with live(StubEngine(step_seconds=0.02)) as server:
        got = raw(server, post(stream) + b"garbage\r\n\r\n", 3.0)
        first, _, second = got.rpartition("HTTP/1.1 ")
        assert first.startswith("HTTP/1.1 200") and ("[DONE]" in first if stream else '"finish_reason"' in first)
        assert second.startswith("400")
        two = raw(server, post(stream) + post(stream) + HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 3.0)
        assert two.count("HTTP/1.1 200") == 2 and two.count("HTTP/1.1 400") == 1 and two.rfind("400") > two.rfind("200")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_only_ends_its_sending_half_is_answered(stream: bool) -> None:
    with live(StubEngine(step_seconds=0.05)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5.0) as sock:
            sock.sendall(post() + post(stream))
            sock.shutdown(socket.SHUT_WR)
            got = b""
            while chunk := sock.recv(65536):
                got += chunk
        assert got.count(b"HTTP/1.1 200") == 2 and got.count(b"HTTP/1.1 ") == 2 + got.count(b"HTTP/1.1 100 Continue")
        assert b"[DONE]" in got or not stream
        assert not server.stub.aborted


@pytest.mark.parametrize("paused", [False, True])
def test_one_that_left_is_noticed_before_anything_is_to_be_said(paused: bool) -> None:
    stub = StubEngine(step_seconds=0.02)
    stub.paused = paused
    with live(stub) as server:
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=5.0)
        sock.sendall(post().replace(b'"max_tokens": 4', b'"max_tokens":99'))
        wait_until(lambda: server.engine.in_flight == 1)
        began = time.monotonic()
        sock.close()
        wait_until(lambda: server.engine.in_flight == 0)
        assert len(stub.aborted) == 1 and time.monotonic() - began < 1


def test_a_body_that_is_too_large_is_told_so_where_the_connection_ends_too() -> None:
    big = b"a" * (9 << 20)
    with live() as server, socket.create_connection(("127.0.0.1", server.port), timeout=10.0) as sock:
        sock.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(big))
        sock.sendall(big)
        got = b""
        while chunk := sock.recv(65536):
            got += chunk
        assert got.startswith(b"HTTP/1.1 413") and b"connection: close" in got


def test_the_system_waits_for_a_vanished_machine_as_long_as_for_a_reader_and_keeps_little_for_it() -> None:
    with live(write_timeout=7.0) as server, socket.create_connection(("127.0.0.1", server.port), timeout=5.0):
        wait_until(lambda: len(server.server.server_state.connections) == 1)
        (connection,) = server.server.server_state.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 64 << 10


def test_connect_is_refused_plainly_wherever_it_stands(caplog: pytest.LogCaptureFixture) -> None:
    head = b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with live(keep_alive_timeout=1) as server:
        for target in (b"a:1", b"/x", b"[::1]:443"):
            got = raw(server, b"CONNECT " + target + head)
            assert got.startswith("HTTP/1.1 405") and "no proxy" in got and "connection: close" in got
        both = raw(server, b"GET /livez" + head + b"CONNECT a:1" + head)
        assert both.startswith("HTTP/1.1 200") and "HTTP/1.1 405" in both
        for target in (b"http://[::1", b"?x", b"http://h", b"/\xff"):
            assert raw(server, b"GET " + target + head).startswith("HTTP/1.1 400"), target
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_another_protocol_is_not_taken_and_nothing_of_a_request_is_lost(
    protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    up = f"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n".encode()
    body = b'{"prompt": "a", "max_tokens": 1}'
    kind = b"Content-Type: application/json\r\n"
    post = b"POST /v1/completions HTTP/1.1\r\n" + up + kind
    with live(keep_alive_timeout=1) as server:
        sized = post + b"Content-Length: %d\r\n\r\n" % len(body) + body
        chunked = post + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        get = b"GET /version HTTP/1.1\r\n" + up + b"\r\n"
        got = raw(server, get * 300 + sized + chunked + get)
        assert got.count("HTTP/1.1 200") == 303 and got.count('"text"') == 2
        with socket.create_connection(("127.0.0.1", server.port), timeout=5.0) as sock:
            for at in range(0, len(sized), 40):
                sock.sendall(sized[at : at + 40])
                time.sleep(0.005)
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
    assert "pip install" not in caplog.text and "upgrade" not in caplog.text.lower()


def test_a_connection_that_is_reset_after_its_answer_leaves_no_timer() -> None:
    with live(keep_alive_timeout=60) as server:
        made = weakref.WeakSet[Any]()
        before = LimitedProtocol.connection_made

        def seen(self: LimitedProtocol, transport: Any) -> None:
            made.add(self)
            before(self, transport)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LimitedProtocol, "connection_made", seen)
            for _ in range(20):
                sock = socket.create_connection(("127.0.0.1", server.port), timeout=5.0)
                sock.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert sock.recv(65536).startswith(b"HTTP/1.1 200")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()
            wait_until(lambda: not server.server.server_state.connections)
        gc.collect()
        assert len(made) <= 1, "a timer held the others, which nobody will use again"


def test_fractions_of_a_second_keep_a_connection() -> None:
    with live(keep_alive_timeout=0.5) as server, socket.create_connection(("127.0.0.1", server.port), 5.0) as sock:
        for pause in (0.0, 0.15):
            time.sleep(pause)
            sock.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        assert sock.recv(1) == b"", "and then it ends"
