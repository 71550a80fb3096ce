"""A client of thousands of streams: plain sockets, no library, one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any

RESET = b"\x01\0\0\0\0\0\0\0"
"""SO_LINGER of zero seconds: closing sends RST."""


@dataclass
class Answer:
    """What came back. `times`: when each piece of it did, in seconds since the request was sent."""

    status: int
    headers: dict[str, str]
    body: bytes
    times: list[float] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether the stream has its end."""
        return self.body.endswith(b"data: [DONE]\n\n")

    @property
    def text(self) -> str:
        """The text of a completion, streamed or not."""
        if not self.headers["content-type"].startswith("text/event-stream"):
            return str(json.loads(self.body)["choices"][0]["text"])
        events = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: {")]
        return "".join(json.loads(line)["choices"][0]["text"] for line in events)


def request(body: dict[str, Any] | bytes, path: str = "/v1/completions") -> bytes:
    """The bytes of a POST after whose answer the connection ends."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def connect(port: int, window: int = 0, source: str = "127.0.0.1") -> socket.socket:
    """A connection from the address `source`, whose receive buffer has `window` bytes."""
    sock = socket.socket()
    try:
        sock.setblocking(False)
        if window:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        sock.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    except BaseException:  # whoever is cancelled meanwhile gets no socket to close
        sock.close()
        raise
    return sock


async def ask(port: int, data: bytes, source: str = "127.0.0.1") -> Answer:
    """Send `data`, read until the server closes."""
    loop = asyncio.get_running_loop()
    sock = await connect(port, source=source)
    with contextlib.closing(sock):
        began = time.monotonic()
        await loop.sock_sendall(sock, data)
        got, times = bytearray(), list[float]()
        while chunk := await loop.sock_recv(sock, 65536):
            got += chunk
            times.append(time.monotonic() - began)
    return parsed(bytes(got), times)


def parsed(got: bytes, times: list[float]) -> Answer:
    """An answer from its bytes, chunks joined."""
    head, _, rest = got.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        rest = b"".join(_chunks(rest))
    return Answer(int(first.split()[1]), headers, rest, times)


def _chunks(rest: bytes) -> list[bytes]:
    found = []
    at = 0
    while (end := rest.find(b"\r\n", at)) >= 0 and (size := int(rest[at:end], 16)):
        found.append(rest[end + 2 : end + 2 + size])
        at = end + 4 + size
    return found


def percentile(values: list[float], share: float) -> float:
    """The value below which so large a share of `values` lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
