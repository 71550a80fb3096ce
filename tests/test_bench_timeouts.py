"""Servers that never answer, or stop in the middle: every client of quire's ends, and says what kept it waiting."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from quire.bench import serving
from quire.bench.loads import ServeLoad
from quire.core.errors import QuireError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"m"}]}'
EVENT = b'data: {"choices":[{"text":"x"}]}\n\n'


@contextmanager
def speaking(say: Callable[[socket.socket], None], listing: bool = True) -> Iterator[str]:
    """A server that tells its models if `listing`, and `say`s something to everybody else."""

    def serve(sock: socket.socket) -> None:
        with closing(sock):
            try:
                data = b""
                while b"\r\n\r\n" not in data:
                    if not (chunk := sock.recv(65536)):
                        return
                    data += chunk
                if listing and data.startswith(b"GET /v1/models"):
                    sock.sendall(
                        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(MODELS) + MODELS
                    )
                elif listing and data.startswith(b"GET"):
                    sock.sendall(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
                else:
                    say(sock)
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(sock,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def silent(sock: socket.socket) -> None:
    sock.recv(1)


def stuck(sock: socket.socket) -> None:
    """An event, and then nothing."""
    sock.sendall(HEAD + b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
    sock.recv(1)


def trickling(sock: socket.socket) -> None:
    """A comment now and then, for ever."""
    sock.sendall(HEAD)
    for _ in range(400):
        sock.sendall(b"8\r\n: ping\n\n\r\n")
        time.sleep(0.05)


def broken(sock: socket.socket) -> None:
    sock.sendall(b"HTTP/1.1 500 No\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")


def measured(url: str, **options: object) -> serving.ServingResult:
    load = ServeLoad(base_url=url, num_prompts=3, warmup=0, clocks="off", **options)  # type: ignore[arg-type]

    async def bounded() -> serving.ServingResult:
        return await asyncio.wait_for(serving.measure(load), 20)

    return asyncio.run(bounded())


@pytest.mark.parametrize(
    ("say", "told", "kind"),
    [
        (silent, "no byte of an answer came within 0.3 s", "timeout"),
        (stuck, "nothing more of the answer came within 0.3 s", "timeout"),
        (trickling, "the answer was not whole within 1.8 s", "timeout"),
        (broken, "HTTP 500", "HTTP 500"),
        (lambda sock: None, "the connection broke", "connection"),
    ],
)
def test_what_fails_is_counted_by_kind(say: Callable[[socket.socket], None], told: str, kind: str) -> None:
    with speaking(say) as url:
        found = measured(url, timeout=0.3).results()
    assert found["failed"] == {kind: 3} and told in found["errors"][0]


def test_a_server_that_says_nothing_at_all_ends_it() -> None:
    with speaking(silent, listing=False) as url, pytest.raises(QuireError, match=r"timeout|names no model"):
        measured(url, timeout=0.3)


def test_a_machine_that_takes_no_connection_ends_it() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = []
        for _ in range(4):  # the queue is full now: what comes next gets no answer
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
            waiting.append(sock)
        with pytest.raises(QuireError, match="timeout"):
            measured(f"http://127.0.0.1:{full.getsockname()[1]}", timeout=0.3)
        for sock in waiting:
            sock.close()
