"""Images of one request by URL: fetched at once, made ready in their order, and ended by the first refusal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from image_hosts import ANSWERS, answer, host, rules
from live_server import LiveServer, wait_until
from quire.core.errors import BadRequest
from quire.server.text_generation.fetching import FetchCancellation, fetch
from quire.server.text_generation.media import AT_ONCE, FETCHES
from seeing import asked, file_of, image_part, said, seeing, url_of

WAIT = 10.0
"""Seconds after which a test gives up."""
COLORS = ("red", "lime", "blue", "white")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with host() as port:
        yield port


@pytest.fixture(scope="module")
def server(port: int) -> Iterator[LiveServer]:
    with seeing(allow_media_url=(f"127.0.0.1:{port}",), media_timeout=WAIT) as server:
        yield server


class Meeting:
    """Answers once `count` are asked for at the same time. `most`: that were, `left`: clients who went before."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=WAIT)
        self._lock = threading.Lock()
        self._now = self.most = self.left = 0

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self._barrier.wait()
        color = COLORS[int(handler.path.partition("?")[2]) % len(COLORS)]
        with self._lock:
            self._now -= 1
        answer(200, file_of(color))(handler)


def ask(server: LiveServer, *urls: str) -> Any:
    parts = [image_part(url) for url in urls]
    return server.post("/v1/chat/completions", {"messages": asked(*parts), "max_tokens": 1})


def test_they_are_fetched_at_once_and_stay_in_their_order(
    port: int, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several kinds among them: none comes before three are asked for."""
    monkeypatch.setitem(ANSWERS, "/meeting", Meeting(3))
    urls = [f"http://127.0.0.1:{port}/meeting?{i}" for i in range(3)]
    reply = ask(server, *urls[:2], url_of(file_of("white")), urls[2])
    assert reply.status_code == 200, reply.text
    shown = [tuple(image.tiles[0, 0, 0]) for image in server.stub.submitted[-1].images]
    assert shown == [(255, 0, 0), (0, 255, 0), (255, 255, 255), (0, 0, 255)] and said(server).count("<image>") == 16


def test_no_more_of_them_than_one_request_may_have(
    port: int, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ANSWERS, "/meeting", meeting := Meeting(AT_ONCE))
    reply = ask(server, *(f"http://127.0.0.1:{port}/meeting?{i}" for i in range(2 * AT_ONCE)))
    assert reply.status_code == 200, reply.text
    assert meeting.most == AT_ONCE and len(server.stub.submitted[-1].images) == 2 * AT_ONCE


def test_the_first_refusal_ends_the_others(port: int, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third is refused while the first two wait, whose connections end; a fourth was never read."""
    begun, ended = threading.Semaphore(0), threading.Semaphore(0)

    def waits(handler: BaseHTTPRequestHandler) -> None:
        begun.release()
        handler.connection.settimeout(WAIT)
        if not handler.connection.recv(1):
            ended.release()

    def missing(handler: BaseHTTPRequestHandler) -> None:
        assert begun.acquire(timeout=WAIT) and begun.acquire(timeout=WAIT)
        answer(404)(handler)

    monkeypatch.setitem(ANSWERS, "/waits", waits)
    monkeypatch.setitem(ANSWERS, "/gone", missing)
    at, before, began = f"http://127.0.0.1:{port}", len(server.stub.submitted), time.monotonic()
    reply = ask(server, f"{at}/waits", f"{at}/waits", f"{at}/gone", "data:image/png;base64,none")
    assert reply.status_code == 400 and "status 404" in reply.text, reply.text
    assert reply.json()["error"]["param"] == "messages[0].content[2].image_url.url"
    assert ended.acquire(timeout=WAIT) and ended.acquire(timeout=WAIT)
    assert time.monotonic() - began < WAIT and len(server.stub.submitted) == before
    media = server.service.media
    wait_until(lambda: media._fetches._value == FETCHES and media.preparing == 0)
    assert ask(server, f"{at}/image").status_code == 200


def test_nothing_is_fetched_that_nobody_wants(port: int) -> None:
    wanted, named = FetchCancellation(), rules(f"127.0.0.1:{port}", seconds=WAIT)
    timer = threading.Timer(0.2, wanted.end)
    timer.start()
    began = time.monotonic()
    for _ in range(2):  # while it waits, and before it began
        with pytest.raises(BadRequest):
            fetch(f"http://127.0.0.1:{port}/silent", "url", named, wanted)
    assert time.monotonic() - began < 2.0
    timer.join()
