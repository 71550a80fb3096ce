"""Bodies, bytes and messages that nobody sane would send: always an answer, never a 5xx; test_reliability_load.py."""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from live_server import LiveServer, live, wait_until
from quire.core.request import Output
from quire.engine.client import Abort, ChangeAdapter, ResetPrefixCache, Submit
from quire.engine.processes.worker import Worker
from quire.server.http.dialects import TEI
from quire.server.routes import TABLE
from raw_client import ask, request
from reliability_requests import FULL, MIB, ODD, malformed
from stub_engine import stub_info
from stub_server import StubServer
from supervised_engines import request as engine_request

GOLDEN = {"prompt": "x = 1", "max_tokens": 8, "seed": 5}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live() as server:
        yield server


class Schemas:
    """Values for the schemas of openapi.json: those that fit, and with some chance others."""

    def __init__(self, schemas: dict[str, Any], seed: int) -> None:
        self._schemas, self._rng = schemas, random.Random(seed)

    def value(self, schema: dict[str, Any], wrong: float, depth: int = 0) -> Any:
        """A value; a part of it is of any other kind with the chance `wrong`."""
        rng = self._rng
        if rng.random() < wrong or depth > 5:
            return rng.choice(ODD)
        if "$ref" in schema:
            return self.value(self._schemas[schema["$ref"].rsplit("/", 1)[1]], wrong, depth)
        if "anyOf" in schema:
            return self.value(rng.choice(schema["anyOf"]), wrong, depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        return self._of_type(schema, wrong, depth)

    def _of_type(self, schema: dict[str, Any], wrong: float, depth: int) -> Any:
        rng, kind = self._rng, schema.get("type")
        if kind == "object":
            names = {n: s for n, s in schema.get("properties", {}).items() if n in schema.get("required", ()) or
                     rng.random() < 0.12}  # fmt: skip
            found = {name: self.value(s, wrong, depth + 1) for name, s in names.items() if rng.random() > wrong}
            if not names or rng.random() < wrong:
                found[rng.choice(("5", "a", "max_tokens", "\x00"))] = rng.choice(ODD)
            return found
        if kind == "array":
            return [self.value(schema.get("items", {}), wrong, depth + 1) for _ in range(rng.randrange(4))]
        plain: dict[str, Any] = {
            "integer": rng.choice((0, 1, 2, 5, 19, -1, 2**31)), "number": rng.choice((0, 0.5, 1, -2.5, 1e300)),
            "string": rng.choice(("", "a", "stub", "user", "text", "é😀", "<|end|>")), "boolean": rng.random() < 0.5,
            "null": None,
        }  # fmt: skip
        return plain[kind] if kind in plain else rng.choice(ODD)


BY_BODY = ("/rerank",)
"""Paths whose errors are in TEI's shape where the body is TEI's."""


def check_reply(path: str, told: dict[str, Any], reply: Any) -> None:
    """The status is documented, and the body has the schema that is documented for it."""
    assert str(reply.status_code) in told["responses"], (path, reply.text)
    assert reply.status_code < 500, (path, reply.text)
    kind = reply.headers.get("content-type", "").split(";")[0]
    assert not reply.content or kind in told["responses"][str(reply.status_code)]["content"], (path, kind)
    if reply.status_code != 200:
        shape = TABLE.dialect(path).shape
        if path in BY_BODY and isinstance(reply.json()["error"], str):
            shape = TEI.shape
        assert msgspec.json.decode(reply.content, type=shape)
    elif kind == "application/json":
        route = TABLE.at(path)[0]
        one: Any = route.reply[0] if route.reply else None
        shape: Any = list[one] if route.reply_is_list else one | list[one] if route.reply_may_be_list else one
        other = route.reply_type is not None and (not route.reply or reply.content.startswith(b"["))
        shape = route.reply_type if other else shape
        msgspec.json.decode(reply.content, type=shape, dec_hook=lambda _, items: iter(items))


def test_bodies_made_from_the_schemas_get_what_is_documented(server: LiveServer) -> None:
    """T5."""
    told = server.http.get("/openapi.json").json()
    made = Schemas(told["components"]["schemas"], seed=5)
    routes = {path: methods.get("post", {}) for path, methods in told["paths"].items()}
    posts = {path: operation for path, operation in routes.items() if "requestBody" in operation}
    assert set(posts) == {route.path for route in TABLE.routes if route.body} and len(posts) == 36
    for path, operation in posts.items():
        content = operation["requestBody"]["content"]
        if "application/json" not in content:  # forms with files have tests of their own
            continue
        schema = content["application/json"]["schema"]
        for case in range(20_000 if FULL else 60):
            body = made.value(schema, wrong=(0.0, 0.02, 0.1)[case % 3])
            if isinstance(body, dict) and path.startswith(("/v1/c", "/v1/m")):
                body.setdefault("max_tokens", 2)
            check_reply(path, operation, server.post(path, body))
    for name in ("stub", "%2e%2e/x", "%00", "é", "a" * 5000):
        card = told["paths"]["/v1/models/{model}"]["get"]
        check_reply("/v1/models/{model:path}", card, server.http.get(f"/v1/models/{name}"))
    for path in ("/v1/models", "/health", "/ping", "/livez", "/readyz", "/load", "/version", "/metrics"):
        check_reply(path, told["paths"][path]["get"], server.http.get(path))
    assert server.engine.in_flight == 0 and server.engine.healthy


def test_malformed_bodies_are_refused_and_change_nothing(server: LiveServer) -> None:
    """T6."""
    rng, golden = random.Random(6), server.complete(**GOLDEN)["choices"]
    headers, refused = {"content-type": "application/json"}, 0
    for case in range(10_000 if FULL else 300):
        path, body = malformed(rng)
        reply = server.http.post(path, content=body, headers=headers)
        assert reply.status_code in (200, 400, 404), (path, body, reply.text)
        refused += reply.status_code != 200
        if case % 100 == 99:
            assert server.complete(**GOLDEN)["choices"] == golden
    assert refused > case * 0.8 and server.engine.in_flight == 0


@pytest.mark.slow
def test_bodies_of_tiny_chunks_leave_no_memory() -> None:
    """T4: a million chunks of a byte each, again and again; half of them end in the middle."""
    count, size = (100 if FULL else 6), 1_000_000
    body = b'{"prompt": "' + b"a" * (size - 14) + b'"}'
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = request(b"").replace(b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n")

    async def run(port: int) -> list[int]:
        found = []
        for number in range(count):
            answer = await ask(port, head + chunks)
            assert answer.status == 400 and b"context_length_exceeded" in answer.body
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(head + chunks[: len(chunks) * number // count])
            found.append(server.rss)
        return found

    with StubServer(info=stub_facts()) as server:
        found = asyncio.run(run(server.port))
        wait_until(lambda: server.in_flight == 0)
    print(f"\nT4: {count} bodies of {size} chunks: {(found[-1] - found[1]) / MIB:.2f} MiB more than after the second")
    assert found[-1] - found[1] < (MIB if FULL else 4 * MIB)


def stub_facts() -> dict[str, Any]:
    """The stub's own."""
    return {"max_model_len": stub_info().max_model_len}


class Deaf:
    """An engine that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def submit(self, request: Any) -> Output | None:
        """Note it."""
        return self.told.append(request.id)  # type: ignore[func-returns-value]

    def abort(self, request_id: str, index: int | None) -> None:
        """Note it."""
        self.told.append(request_id)

    @property
    def adapting(self) -> Deaf:
        """Itself."""
        return self

    def change(self, change: ChangeAdapter) -> Any:
        """Nothing comes of it."""
        return ()

    def stats(self) -> None:
        """None."""

    def reset_prefix_cache(self) -> None:
        """Nothing to do."""


def frames(rng: random.Random, count: int) -> Iterator[bytes]:
    """Random bytes, and good messages with something changed."""
    kinds = (Submit(engine_request("r")), Abort("r", 1), ChangeAdapter("a", "b"), ResetPrefixCache())
    good = [msgspec.msgpack.encode(kind) for kind in kinds]
    for _ in range(count):
        frame = bytearray(rng.choice(good) if rng.random() < 0.8 else rng.randbytes(rng.randrange(200)))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(frame) + 1)
            frame[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
        yield bytes(frame)


def test_an_engine_drops_messages_that_it_cannot_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T25."""
    context = zmq.Context.instance()
    inbox, outbox, engine = f"ipc://{tmp_path}/to", f"ipc://{tmp_path}/from", Deaf()
    with context.socket(zmq.PUSH) as to, context.socket(zmq.PULL) as back:
        for sock, address in ((to, inbox), (back, outbox)):
            sock.setsockopt(zmq.LINGER, 0)
            sock.bind(address)
        worker = Worker(inbox, outbox)
        try:
            for frame in frames(random.Random(25), 100_000 if FULL else 3000):
                to.send(frame)
                worker.receive(engine, 0)  # type: ignore[arg-type]
            to.send(msgspec.msgpack.encode(Abort("the last")))
            while "the last" not in engine.told:
                worker.receive(engine, 1000)  # type: ignore[arg-type]
        finally:
            worker.inbox.close(0)
            worker.outbox.close(0)
    dropped = re.findall("a message that cannot be read was dropped", caplog.text)
    assert len(dropped) > 1000 and engine.told


def test_whoever_sent_a_request_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    context = zmq.Context.instance()
    inbox, outbox = f"ipc://{tmp_path}/to", f"ipc://{tmp_path}/from"
    with context.socket(zmq.PUSH) as to, context.socket(zmq.PULL) as back:
        for sock, address in ((to, inbox), (back, outbox)):
            sock.setsockopt(zmq.LINGER, 0)
            sock.bind(address)
        worker = Worker(inbox, outbox)
        try:
            to.send(msgspec.msgpack.encode({"type": "submit", "request": {"id": "r", "prompt": ["no token"]}}))
            to.send(msgspec.msgpack.encode({"type": "abort", "request": {"id": "s"}}))
            refused = worker.receive(Deaf(), 1000) + worker.receive(Deaf(), 1000)  # type: ignore[arg-type]
        finally:
            worker.inbox.close(0)
            worker.outbox.close(0)
    (output,) = refused
    assert (output.request_id, output.finish_reason, output.error_kind) == ("r", "error", "PartFailure")
