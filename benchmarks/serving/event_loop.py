"""The longest time that a server's event loop stands still under the worst bodies of 8 MiB.

    python -m benchmarks.serving.event_loop

Each row is an API and a kind of body, with the status, the seconds until the answer, and the longest hold while it was
read, refused or answered: milliseconds by the clock, and those of them in which the server computed (where the machine
is not idle). Nothing else is asked meanwhile. The engine is a stub (tests/support/stub_engine.py) behind the real
server, tokenizer and chat template. `--bar` 20: the exit code is 1 where a hold is longer. `--only TEXT`: rows that
have it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
SIZE = 8 << 20
TICK = 0.001


def many(item: bytes, size: int = SIZE - 400) -> bytes:
    """A list of as many items as `size` bytes hold."""
    return b"[" + b",".join([item] * (size // (len(item) + 1))) + b"]"


def some(item: bytes, count: int) -> bytes:
    """A list of `count` items."""
    return b"[" + b",".join([item] * count) + b"]"


def names(value: bytes, count: int) -> bytes:
    """An object of `count` fields, which are numbers."""
    return b"{" + b",".join(b'"%d":%b' % (i, value) for i in range(count)) + b"}"


def tools(count: int, kind: str = "function") -> bytes:
    """Tools of names of their own."""
    shape = b'{"type":"function","function":{"name":"f%d","parameters":{"type":"object"}}}'
    if kind != "function":
        shape = b'{"name":"f%d","input_schema":{"type":"object"}}'
    return b"[" + b",".join(shape % i for i in range(count)) + b"]"


def schema(count: int) -> bytes:
    """An object of so many properties."""
    fields = b",".join(b'"p%d":{"type":"string"}' % i for i in range(count))
    return b'{"type":"object","properties":{' + fields + b"}}"


LONG = b'"' + b"a" * (SIZE - 400) + b'"'
PROSE = b'"' + (b"Well, what is it: a [list], or {none}? " * (SIZE // 40))[: SIZE - 400] + b'"'
ESCAPES = b'"' + b"\\n" * (SIZE // 2 - 200) + b'"'
UNICODE = b'"' + b"\\u00e9" * (SIZE // 6 - 100) + b'"'
WIDE = b'"' + "é".encode() * (SIZE // 2 - 200) + b'"'
SAID = b'{"role":"user","content":"hi"}'
VALUES: dict[str, Callable[[], bytes]] = {
    "one long text": lambda: LONG,
    "prose": lambda: PROSE,
    "escapes everywhere": lambda: ESCAPES,
    "unicode escapes": lambda: UNICODE,
    "characters of two bytes": lambda: WIDE,
    "1,000,000 ids": lambda: some(b"99", 1_000_000),
    "500,000 ids": lambda: some(b"99", 500_000),
    "8 MiB of empty texts": lambda: many(b'""'),
    "8 MiB of empty lists": lambda: many(b"[]"),
    "8 MiB of empty objects": lambda: many(b"{}"),
    "500,000 objects": lambda: some(b'{"a":1}', 500_000)[:-1] + b"]",
    "1,000 deep": lambda: b"[" * 1000 + b"]" * 1000,
    "8 MiB deep": lambda: b"[" * (SIZE // 2 - 200) + b"]" * (SIZE // 2 - 200),
    "a name twice, far apart": lambda: names(b"1", 400_000)[:-1] + b',"0":1}',
    "a number of 1,000,000 digits": lambda: b"1" * 1_000_000,
    "a fraction of 1,000,000 digits": lambda: b"1." + b"1" * 1_000_000,
    "a name of 8 MiB": lambda: b"{" + LONG + b":1}",
    "numbers of 4,000 digits": lambda: many(b"1" * 4000),
    "nothing but spaces": lambda: b" " * (SIZE - 400),
}
"""What stands in the field that says what is asked."""
MESSAGES: dict[str, Callable[[], bytes]] = {
    "100,000 small messages": lambda: some(SAID, 100_000),
    "8,000 small messages": lambda: some(SAID, 8000),
    "8,000 messages of 1,000 bytes": lambda: some(b'{"role":"user","content":"%b"}' % (b"ab " * 333), 8000),
    "messages of the wrong kind": lambda: some(SAID, 8000)[:-1] + b',{"role":1}]',
    "100,000 parts": lambda: b'[{"role":"user","content":%b}]' % some(b'{"type":"text","text":"a"}', 100_000),
    "1,000 parts in 40 messages": lambda: some(
        b'{"role":"user","content":%b}' % some(b'{"type":"text","text":"a"}', 1000), 40
    ),
    "a message of 8 MiB": lambda: b'[{"role":"user","content":%b}]' % LONG,
    "messages of unknown fields": lambda: some(b'{"role":"user","content":"hi","x":1,"y":2}', 8000),
    "a type that is a list": lambda: b'[{"role":"user","content":[{"type":%b}]}]' % some(b"[1]", 40_000),
}
"""Conversations."""
BESIDE: dict[str, Callable[[], bytes]] = {
    "tools=100,000": lambda: tools(100_000),
    "tools=128 of large schemas": lambda: (
        tools(127)[:-1] + b',{"type":"function","function":{"name":"g","parameters":%b}}]' % schema(10_000)
    ),
    "logit_bias=100,000": lambda: names(b"1", 100_000),
    "stop=100,000": lambda: some(b'"ab"', 100_000),
    "metadata=100,000": lambda: names(b'"a"', 100_000),
    "allowed_token_ids=500,000": lambda: some(b"99", 500_000),
    "bad_words=100,000": lambda: some(b'"ab"', 100_000),
    "bad_words=1,000": lambda: some(b'"%b"' % (b"ab" * 2000), 1000),
    "user=" + "a list of 500,000": lambda: some(b"1", 500_000),
    "nobody_knows_this=" + "8 MiB": lambda: many(b"[]"),
    "response_format=" + "a large schema": lambda: (
        b'{"type":"json_schema","json_schema":{"name":"a","schema":%b}}' % schema(15_000)
    ),
}
"""Other fields, of the APIs that have them."""
PICTURE = b'[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}]}]' % (
    b"QUJD" * (SIZE // 4 - 200)
)

FIELDS: dict[str, tuple[str, str]] = {
    "/v1/completions": ("prompt", '{"max_tokens":1,'),
    "/v1/chat/completions": ("messages", '{"max_tokens":1,'),
    "/v1/responses": ("input", '{"max_output_tokens":16,'),
    "/v1/messages": ("messages", '{"model":"stub","max_tokens":1,'),
    "/v1/messages/count_tokens": ("messages", '{"model":"stub",'),
    "/api/chat": ("messages", '{"model":"stub","options":{"num_predict":1},'),
    "/api/generate": ("prompt", '{"model":"stub","options":{"num_predict":1},'),
    "/api/embed": ("input", '{"model":"stub",'),
    "/generate": ("inputs", '{"parameters":{"max_new_tokens":1},'),
    "/completion": ("prompt", '{"n_predict":1,'),
    "/v1/embeddings": ("input", "{"),
    "/v1/score": ("text_2", '{"text_1":"a",'),
    "/v1/rerank": ("documents", '{"query":"a",'),
    "/tokenize": ("prompt", "{"),
    "/detokenize": ("tokens", "{"),
}
"""By path: the field that says what is asked, and what stands before it."""


def bodies() -> list[tuple[str, str, Callable[[], bytes]]]:
    """Paths, names of bodies, and how each is made."""
    found: list[tuple[str, str, Callable[[], bytes]]] = []
    for path, (field, lead) in FIELDS.items():
        kinds = VALUES | (MESSAGES if field == "messages" or path == "/v1/responses" else {})
        found += [(path, name, with_field(lead, field, make)) for name, make in kinds.items()]
    for path in ("/v1/completions", "/v1/chat/completions"):
        field, lead = FIELDS[path]
        said = some(SAID, 1).decode() if field == "messages" else '"a"'
        for name, make in BESIDE.items():
            found.append((path, name, with_field(f'{lead}"{field}":{said},', name.partition("=")[0], make)))
    found.append(("/v1/chat/completions", "a picture of 8 MiB", with_field("{", "messages", lambda: PICTURE)))
    found.append(
        ("/v1/completions", "2,000 prompts", with_field('{"max_tokens":1,', "prompt", lambda: some(b'"a"', 2000)))
    )
    found.append(("/v1/embeddings", "2,000 texts", with_field("{", "input", lambda: some(b'"a b"', 2000))))
    return found


def with_field(lead: str, field: str, make: Callable[[], bytes]) -> Callable[[], bytes]:
    """A body that ends with that field."""
    return lambda: b'%b"%b":%b}' % (lead.encode(), field.encode(), make())


class Watch:
    """An ASGI application that tells at /hold how long the loop has stood still at most since it was last asked."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._worst = self._spent = self._last = self._used = 0.0

    def _tick(self) -> None:
        now, used = time.perf_counter(), time.process_time()
        stood = now - self._last - TICK
        self._worst = max(self._worst, stood)
        self._spent = max(self._spent, min(stood, used - self._used))
        self._last, self._used = now, used
        asyncio.get_running_loop().call_later(TICK, self._tick)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] != "/hold":
            await self._app(scope, receive, send)
            return
        if not self._last:
            self._last, self._used = time.perf_counter(), time.process_time()
            self._tick()
        body, self._worst, self._spent = json.dumps([self._worst, self._spent]).encode(), 0.0, 0.0
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def serve(told: Connection) -> None:
    """A server in this process, which tells its port."""
    sys.path[:0] = [str(ROOT / "tests" / "support")]
    import stub_engine
    from live_server import FOLDER, text_tools
    from quire.core.config import flat_config
    from quire.engine.frontend.async_engine import AsyncEngine
    from quire.server.app import create_app
    from quire.server.draining import DrainingServer, uvicorn_config
    from quire.server.http.address import bind
    from quire.server.models.start import server_of_one
    from quire.server.run import prepare
    from quire.server.server_options import ServerOptions
    from quire.server.service import Service
    from stub_engine import StubEngine, stub_info

    stub_engine.next_token = lambda prefix, seed, index: 8  # that of tests hashes the prompt for each token
    options = ServerOptions(port=0, access_log="off")
    prepare(options)
    info = stub_info(folder=str(FOLDER), max_model_len=1 << 17, max_num_queued_reqs=4096)
    tokenizer, template = text_tools()
    state = server_of_one(Service(AsyncEngine(StubEngine(info)), tokenizer, template, options, flat_config()))
    sock = bind(options)
    sock.listen()
    told.send(sock.getsockname()[1])
    watched: Any = Watch(create_app(state))
    server = DrainingServer(uvicorn_config(watched, options), state)
    gc.freeze()
    with server.garbage.seldom():
        server.run(sockets=[sock])


def asked(port: int, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of an answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as sock:
        more = f"Host: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        sock.sendall(f"{head} HTTP/1.1\r\n{more}Content-Type: application/json\r\n\r\n".encode() + body)
        got = b""
        while chunk := sock.recv(1 << 20):
            got += chunk
    head_, _, rest = got.partition(b"\r\n\r\n")
    return int(head_.split()[1]), rest


def hold(port: int) -> tuple[float, float]:
    """Milliseconds since it was last asked: by the clock, and of those in which this process computed."""
    wall, spent = msgspec.json.decode(asked(port, "GET /hold")[1], type=tuple[float, float])
    return 1000 * wall, 1000 * spent


def main() -> int:
    """Ask all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--bar", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    port, worst = ours.recv(), 0.0
    try:
        asked(port, "POST /v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1}')
        hold(port)
        for path, name, make in bodies():
            if given.only not in f"{path} {name}":
                continue
            body = make()
            time.sleep(0.05)
            hold(port)
            began = time.perf_counter()
            status, answer = asked(port, f"POST {path}", body)
            seconds, (held, spent) = time.perf_counter() - began, hold(port)
            worst = max(worst, held)
            row = {
                "path": path,
                "body": name,
                "bytes": len(body),
                "status": status,
                "seconds": seconds,
                "hold_ms": held,
            }
            told = answer[:110].decode(errors="replace") if status >= 400 else ""
            text = f"{path:26} {name:32} {len(body):8} {status} {seconds:7.3f} s {held:7.1f} ms {spent:6.1f} ms  {told}"
            print(json.dumps(row) if given.json else text, flush=True)
    finally:
        server.kill()
    print(f"longest hold: {worst:.1f} ms (bar {given.bar:g} ms)", file=sys.stderr)
    return int(worst > given.bar)


if __name__ == "__main__":
    sys.exit(main())
