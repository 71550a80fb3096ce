"""Broken pictures, and more of them than there is room for: no crash, no 5xx, bounded memory."""

from __future__ import annotations

import io
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mutate import damaged
from pictured import VOCAB, asked, folder, image_part, seeing, url_of
from quire.core.errors import Overloaded
from quire.server.http.bodies import Bodies, Part
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


def test_a_server_counts_bodies_until_pictures_are_taken_out() -> None:
    with seeing(max_bodies_gb=3e-5) as server:
        server.stub.paused = True
        data = next(data for kind, data in mutated(1, 1) if kind)
        waiting = threading.Thread(target=server.post, args=(CHAT, body_of(bytes(5000) + data)))
        waiting.start()
        waiting.join(10.0)
        first = threading.Thread(
            target=server.post, args=(CHAT, {"messages": [{"role": "user", "content": "x" * 900}]})
        )
        first.start()
        time.sleep(0.1)
        server.stub.paused = False
        first.join(10.0)
        assert server.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).status_code == 200


@pytest.mark.slow
def test_a_thousand_broken_pictures_through_a_server_process() -> None:
    info = {"folder": str(folder()), "pictures": True, "vocab_size": VOCAB}
    with StubServer(step_seconds=0.0, info=info) as server:
        for kind, data in mutated(12, 1):
            server.client.post(CHAT, json=body_of(data, kind))
        before, peak, stop = server.rss, [0], threading.Event()

        def watch() -> None:
            while not stop.wait(0.01):
                peak[0] = max(peak[0], server.rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        with ThreadPoolExecutor(8) as pool:
            replies = pool.map(lambda each: server.client.post(CHAT, json=body_of(each[1], each[0])), mutated(1000, 7))
            found = Counter(reply.status_code for reply in replies)
        stop.set()
        watcher.join()
        assert set(found) <= {200, 400} and found.total() == 1000 and found[400] > 300, found
        assert server.process.poll() is None and server.in_flight == 0
        grown = server.rss - before
        print(
            f"{dict(found)}; memory {before >> 20} MiB before, {peak[0] >> 20} at most, {grown >> 20} more at the end"
        )
        assert peak[0] - before < 1200 << 20 and grown < 300 << 20


@pytest.mark.slow
def test_a_flood_of_large_pictures_is_bounded() -> None:
    """64 at a time of 24 megapixels: two are decoded at a time, whatever waits."""
    held = io.BytesIO()
    Image.effect_noise((6000, 4000), 60).convert("RGB").save(held, "JPEG", quality=60)
    info = {"folder": str(folder()), "pictures": True, "vocab_size": VOCAB}
    with StubServer(step_seconds=0.0, info=info) as server:
        before, peak, stop = server.rss, [0], threading.Event()

        def watch() -> None:
            while not stop.wait(0.02):
                peak[0] = max(peak[0], server.rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        bodies = [body_of(held.getvalue() + bytes([i]), "JPEG") for i in range(64)]
        with ThreadPoolExecutor(64) as pool:
            found = Counter(
                pool.map(lambda body: server.client.post(CHAT, json=body, timeout=300.0).status_code, bodies)
            )
        stop.set()
        watcher.join()
        size = len(held.getvalue()) >> 20
        print(f"{dict(found)} of {size} MiB each; memory {before >> 20} MiB before, {peak[0] >> 20} at most")
        assert set(found) <= {200, 429} and found[200] >= 16
        assert peak[0] - before < 3 << 30
