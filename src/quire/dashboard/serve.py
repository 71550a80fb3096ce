"""A server for one viewer on this machine: the page of the files as they are now, and whether they still are."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from quire.core.errors import ConfigError, QuireError
from quire.dashboard.gather import gather, stamp
from quire.dashboard.page import page

HOST = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost")
"""Names it answers to: a page elsewhere whose name leads here is to read nothing (DNS rebinding)."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What the page asks once a second: `stamp` of the files now, or what is wrong with them."""

    stamp: str = ""
    error: str = ""


class Pages:
    """Makes the page anew when files have changed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._made: tuple[str, bytes] | None = None

    def state(self) -> State:
        """State of the files."""
        try:
            return State(stamp=self._stamp())
        except QuireError as error:
            return State(error=error.message)

    def page(self) -> bytes:
        """Page of the files as they are; where they cannot be read, `ConfigError`."""
        with self._lock:
            now = self._stamp()
            if self._made is None or self._made[0] != now:
                self._made = (now, page(gather(self._paths), now))
            return self._made[1]

    def _stamp(self) -> str:
        return hashlib.sha256(stamp(self._paths).encode()).hexdigest()[:16]


class Handler(BaseHTTPRequestHandler):
    """`/` and `/state`."""

    pages: Pages

    def do_GET(self) -> None:
        """Answer one request."""
        path = urlsplit(self.path).path
        if (self.headers.get("host") or "").rsplit(":", 1)[0] not in NAMES:
            self._answer(421, "text/plain", b"this server does not answer to that name\n")
        elif path == "/":
            self._page()
        elif path == "/state":
            self._answer(200, "application/json", msgspec.json.encode(self.pages.state()))
        else:
            self._answer(404, "text/plain", b"there are / and /state\n")

    def _page(self) -> None:
        try:
            self._answer(200, "text/html", self.pages.page())
        except QuireError as error:
            self._answer(500, "text/plain", f"quire: {error.message}\nreload the page when it is mended\n".encode())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", f"{kind}; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.send_header("cache-control", "no-store")
        self.send_header("x-content-type-options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: a page that watches would fill the terminal."""


def server(paths: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """One that listens, on a free port where it is 0. `ConfigError` for a port that cannot be had, and of files."""
    pages = Pages(paths)
    pages.page()
    handler = type("BoundHandler", (Handler,), {"pages": pages})
    try:
        made = ThreadingHTTPServer((HOST, port), handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--port {port}: {reason}; another one, or 0 for any free one", param="port") from None
    made.daemon_threads = True
    return made
