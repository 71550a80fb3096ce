"""Broken pictures, and more of them than there is room for: no crash, no 5xx, bounded memory."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image

from live_server import wait_until
from mutate import damaged
from quire.core.errors import Overloaded
from quire.server.http.exchange import Bodies, Part
from seeing import VOCAB, asked, folder, image_part, seeing, url_of
from stub_server import StubServer

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
CHAT = "/v1/chat/completions"


def mutated(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Files with changes in their headers mostly, cut off, and with the head of another kind; (kind, bytes)."""
    rng = np.random.default_rng(seed)
    noise = Image.fromarray(rng.integers(0, 256, (40, 56, 3), np.uint8))
    whole = {}
    for kind in KINDS:
        held = io.BytesIO()
        noise.save(held, kind)
        whole[kind] = held.getvalue()
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        data = whole[kind]
        if rng.random() < 0.15:
            data = data[: int(rng.integers(0, len(data)))]
        elif rng.random() < 0.1:
            data = whole[KINDS[int(rng.integers(len(KINDS)))]][:64] + data[64:]
        else:
            data = damaged(data, 200, rng)
        yield kind, data


def body_of(data: bytes, kind: str = "PNG") -> dict[str, Any]:
    return {"messages": asked("What?", image_part(url_of(data, f"image/{kind.lower()}"))), "max_tokens": 1}


def test_broken_pictures_are_refused_or_read() -> None:
    with seeing() as server:
        found = Counter(server.post(CHAT, body_of(data, kind)).status_code for kind, data in mutated(60, 5))
        assert set(found) == {200, 400} and found[400] > 15, found
        assert server.engine.in_flight == 0 == server.service.media.preparing


def test_bodies_have_room_together() -> None:
    bodies = Bodies(100)
    one, other = Part(bodies), Part(bodies)
    one.take(150)  # alone
    with pytest.raises(Overloaded, match="--max-bodies-gb"):
        other.take(1)
    one.release()
    other.take(60)
    with pytest.raises(Overloaded):
        one.take(60)
    other.release()
    other.release()
    assert bodies.held == 0


def test_a_server_counts_bodies_that_are_read() -> None:
    with seeing(max_bodies_gb=3e-5) as server:

        def status(size: int) -> int:
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "user": "x" * size}
            return server.post(CHAT, body).status_code

        assert status(40_000) == 200, "one alone may have any size"
        fields = ("host: 127.0.0.1", "content-type: application/json", "content-length: 40000")
        head = "\r\n".join([f"POST {CHAT} HTTP/1.1", *fields, "", ""])
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(head.encode() + b"x" * 20_000)
            wait_until(lambda: server.state.active == 1)
            time.sleep(0.2)  # else the other body may be the first that is read, and this one be refused
            assert status(20_000) == 429 and status(100) == 200
        wait_until(lambda: status(20_000) == 200)


class Watching(threading.Thread):
    """How much memory a server takes, until the end of a `with`."""

    def __init__(self, server: StubServer) -> None:
        super().__init__()
        self.server, self.before, self.peak = server, server.rss, 0
        self.over = threading.Event()

    def run(self) -> None:
        """Look, again and again."""
        while not self.over.wait(0.01):
            self.peak = max(self.peak, self.server.rss)

    def __enter__(self) -> Watching:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()

    @property
    def grown(self) -> int:
        """Bytes that were taken at most beside those of the beginning."""
        return self.peak - self.before


@pytest.mark.slow
def test_a_thousand_broken_pictures_through_a_server_process() -> None:
    info = {"folder": str(folder()), "pictures": True, "vocab_size": VOCAB}
    with StubServer(step_seconds=0.0, info=info) as server:
        for kind, data in mutated(12, 1):
            server.client.post(CHAT, json=body_of(data, kind))
        with Watching(server) as memory, ThreadPoolExecutor(8) as pool:
            replies = pool.map(lambda each: server.client.post(CHAT, json=body_of(each[1], each[0])), mutated(1000, 7))
            found = Counter(reply.status_code for reply in replies)
        assert set(found) <= {200, 400} and found.total() == 1000 and found[400] > 300, found
        assert server.process.poll() is None and server.in_flight == 0
        left = server.rss - memory.before
        print(f"{dict(found)}; MiB beside {memory.before >> 20}: {memory.grown >> 20} at most, {left >> 20} at the end")
        assert memory.grown < 1200 << 20 and left < 300 << 20


@pytest.mark.slow
def test_a_flood_of_large_pictures_is_bounded() -> None:
    """64 at a time of 24 megapixels: two are decoded at a time, whatever waits."""
    held = io.BytesIO()
    Image.effect_noise((6000, 4000), 60).convert("RGB").save(held, "JPEG", quality=60)
    info = {"folder": str(folder()), "pictures": True, "vocab_size": VOCAB}
    with StubServer(step_seconds=0.0, info=info) as server:
        bodies = [body_of(held.getvalue() + bytes([i]), "JPEG") for i in range(64)]
        with Watching(server) as memory, ThreadPoolExecutor(64) as pool:
            replies = pool.map(lambda body: server.client.post(CHAT, json=body, timeout=300.0), bodies)
            found = Counter(reply.status_code for reply in replies)
        size = len(held.getvalue()) >> 20
        print(f"{dict(found)} of {size} MiB each; MiB beside {memory.before >> 20}: {memory.grown >> 20} at most")
        assert set(found) <= {200, 429} and found[200] >= 16
        assert memory.grown < 3 << 30
