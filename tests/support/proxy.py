"""A proxy that shows a server under a path, as nginx does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx


class Proxy(BaseHTTPRequestHandler):
    """Passes on what lies below `path` to `target`, without it, and whole answers back."""

    path_shown = ""
    target = ""

    def do_GET(self) -> None:
        """One request."""
        assert self.path.startswith(f"{self.path_shown}/"), self.path
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {"content-type": "application/json"} if body else {}
        address = self.target + self.path.removeprefix(self.path_shown)
        reply = httpx.request(self.command, address, content=body, headers=headers)
        self.send_response(reply.status_code)
        for name in ("content-type", "content-security-policy"):
            self.send_header(name, reply.headers.get(name, ""))
        self.end_headers()
        self.wfile.write(reply.content)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def shown_below(path: str, target: str) -> Iterator[str]:
    """The address of `target` behind such a proxy, without a slash at the end."""
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), type("Here", (Proxy,), {"path_shown": path, "target": target}))
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}{path}"
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
