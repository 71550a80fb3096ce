"""Searches for cycles at the server's own moments."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from live_server import live
from quire.server import draining
from quire.server.draining import Garbage
from raw_client import ask, request
from stub_engine import StubEngine, stub_info


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.own = self


def left_over() -> tuple[weakref.ref[Cycle], list[list[int]]]:
    """A cycle that nobody has, and enough new objects that a search is worth it."""
    return weakref.ref(Cycle()), [[] for _ in range(2 * draining.NEW_OBJECTS)]


def test_there_are_no_searches_but_its_own() -> None:
    assert gc.isenabled()
    with Garbage().seldom():
        assert not gc.isenabled()
        cycle, _new = left_over()
        assert cycle() is not None
    assert gc.isenabled()


def test_while_requests_are_served_it_searches_seldom() -> None:
    found = Garbage()
    with found.seldom():
        first, _new = left_over()
        found.look(idle=False)
        assert first() is None
        second, _newer = left_over()
        found.look(idle=False)
        assert second() is not None, "the last search is not a hundred times its own length ago"
        found.look(idle=True)
        assert second() is None


def test_where_nothing_is_new_it_does_not_search() -> None:
    found = Garbage()
    with found.seldom():
        gc.collect()
        cycle = weakref.ref(Cycle())
        found.look(idle=True)
        assert cycle() is not None
    gc.collect()
    assert cycle() is None


def test_freed_memory_goes_back_when_nothing_is_served_and_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = list[float]()
    monkeypatch.setattr(draining, "trim_heap", lambda: trimmed.append(0.0))
    found = Garbage()
    with found.seldom():
        for idle in (True, False, True, True, False, True):
            found.look(idle=idle)
    assert len(trimmed) == 1, "not before or while requests are served, and not twice within two seconds"


LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
BODY: dict[str, Any] = {"prompt": [8, 9], "max_tokens": 5}


@pytest.mark.parametrize(
    ("data", "status", "room"),
    [
        (LIVEZ, 200, 20),
        (request(BODY), 200, 20),
        (request(BODY | {"stream": True}), 200, 20),
        (request(BODY | {"temperature": -1}), 400, 20),
        (request(BODY), 429, 1),
    ],
)
def test_a_request_leaves_no_circles(data: bytes, status: int, room: int) -> None:
    """With 400 refusals in a second they were 4 MB, which only a search gave back."""
    stub = StubEngine(stub_info(max_num_queued_reqs=room))

    async def run(port: int) -> int:
        stub.paused = status == 429
        waiting = asyncio.create_task(ask(port, request(BODY)))
        await asyncio.sleep(0.2)
        for _ in range(3):  # what is made once
            await ask(port, data)
        gc.collect()
        gc.disable()
        for _ in range(20):
            assert (await ask(port, data)).status == status
        await asyncio.sleep(0.2)
        found = gc.collect()
        stub.paused = False
        await waiting
        return found

    with live(stub) as server:
        try:
            found = asyncio.run(run(server.port))
        finally:
            gc.enable()
    assert found < 20
