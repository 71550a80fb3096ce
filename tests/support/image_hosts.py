"""Hosts that send images by rules of their own."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from quire.server.text_generation.fetching import Rules, read_hosts
from seeing import file_of

DATA = file_of()
Answer = Callable[[BaseHTTPRequestHandler], None]


def answer(status: int, body: bytes = b"", **headers: str) -> Answer:
    def say(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"content_length": str(len(body)), **headers}.items():
            if value:
                handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return say


def moved(where: str, status: int = 302) -> Answer:
    return answer(status, location=where)


def trickle(handler: BaseHTTPRequestHandler) -> None:
    """A byte now and then, for ever: no single read takes long."""
    answer(200, content_length="60000")(handler)
    while True:
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.02)


def trickled_head(handler: BaseHTTPRequestHandler) -> None:
    while True:
        handler.wfile.write(b"H")
        handler.wfile.flush()
        time.sleep(0.02)


def endless(handler: BaseHTTPRequestHandler) -> None:
    answer(200, content_length="")(handler)
    while True:
        handler.wfile.write(bytes(1 << 16))


def chunked(handler: BaseHTTPRequestHandler) -> None:
    answer(200, content_length="", transfer_encoding="chunked")(handler)
    for at in range(0, len(DATA), 50):
        part = DATA[at : at + 50]
        handler.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
    handler.wfile.write(b"0\r\n\r\n")


ANSWERS: dict[str, Answer] = {
    "/image": answer(200, DATA),
    "/open": answer(200, DATA, content_length=""),
    "/chunked": chunked,
    "/missing": answer(404, b"secret words"),
    "/huge": answer(200, content_length=str(1 << 40)),
    "/endless": endless,
    "/short": answer(200, DATA, content_length=str(len(DATA) + 10)),
    "/compressed": answer(200, DATA, content_encoding="gzip"),
    "/trickle": trickle,
    "/trickled-head": trickled_head,
    "/silent": lambda handler: time.sleep(3),
    "/once": moved("/image"),
    "/twice": moved("once", 307),
    "/circle": moved("/circle", 301),
    "/nowhere": answer(302),
    "/elsewhere": moved("http://elsewhere.example/image"),
    "/inward": moved("http://169.254.169.254/latest/meta-data"),
    "/to-a-file": moved("file:///etc/passwd"),
}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, dict[str, str]]] = []  # noqa: RUF012 (of the one server of a test)

    def do_GET(self) -> None:
        self.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
        self.close_connection = True
        with suppress(ConnectionError):
            ANSWERS[self.path.partition("?")[0]](self)

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def host(certificate: Path | None = None) -> Iterator[int]:
    server = _Server(("127.0.0.1", 0), _Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def rules(*hosts: str, limit: int = 1 << 16, seconds: float = 5.0) -> Rules:
    return Rules(read_hosts(hosts), limit, seconds)
