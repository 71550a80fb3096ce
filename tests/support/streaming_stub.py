"""A server that streams answers of nothing, which load generators are measured against.

    python tests/support/streaming_stub.py CORE

Prints its port. Answers POST /v1/completions with `max_tokens` events, GAP apart, then usage and [DONE], each a chunk
and a write of its own as a real server sends them; reads the little of HTTP that load generators send.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from typing import cast

import uvloop

GAP = 0.002
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
MOST = re.compile(rb'"max_(?:completion_)?tokens": *(\d+)')
PROMPT = re.compile(rb'"prompt": *\[([^\]]*)\]')
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"stub","object":"model","owned_by":"stub"}]}'
EVENT = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"stub","choices":[{"index":0,"text":" x","logprobs":null,"finish_reason":null}]}\n\n'  # noqa: E501
END = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"stub","choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\ndata: [DONE]\n\n'  # noqa: E501


def chunk(data: bytes) -> bytes:
    """As a chunk of HTTP."""
    return b"%x\r\n%s\r\n" % (len(data), data)


TOKEN = chunk(EVENT)


class Stub(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._buffer = b""
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it is open."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio: a request, or part of one."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            length = LENGTH.search(head)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < whole:
                return
            body, self._buffer = self._buffer[end + 4 : whole], self._buffer[whole:]
            if head.startswith(b"POST"):
                self._begin(body)
            else:
                answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                self._transport.write(answer % (len(MODELS), MODELS))

    def _begin(self, body: bytes) -> None:
        count, prompt = MOST.search(body), PROMPT.search(body)
        tokens = int(count[1]) if count else 16
        read = prompt[1].count(b",") + 1 if prompt else 1
        self._transport.write(HEAD + TOKEN)
        self._go_on(tokens - 1, tokens, read)

    def _go_on(self, left: int, tokens: int, read: int) -> None:
        if left > 0:
            self._loop.call_later(GAP, self._next, left, tokens, read)
        else:
            self._transport.write(chunk(END % (read, tokens, read + tokens)) + b"0\r\n\r\n")

    def _next(self, left: int, tokens: int, read: int) -> None:
        if not self._transport.is_closing():
            self._transport.write(TOKEN)
            self._go_on(left - 1, tokens, read)


async def main() -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(sys.argv[1])})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
