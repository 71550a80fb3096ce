"""Servers that are killed, drained and whose clock jumps, again and again; see test_reliability_load.py."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from live_server import live, wait_until
from paths import SOURCE
from raw_client import Answer, ask, request
from reliability_requests import FULL, ROOMY, alone, asked
from serving_process import Serving, children, gone
from stub_engine import StubEngine
from stub_server import StubServer

WALL_CLOCK = {
    "model/load/packed_folder.py", "server/service.py", "server/apis/openai/choices.py", "text/template_worker.py",
    "engine/frontend/engine_metrics.py", "engine/record/recorder.py", "server/http/gateway.py", "cache/store_folder.py",
    "cache/disk.py", "features/adapters/edge_adapter_changes.py", "engine/start.py", "server/apis/openai/classify.py",
    "server/apis/openai/scoring.py",
    "server/apis/ollama/chat.py", "server/apis/openai/responses_answer.py", "server/models/state.py",
    "server/http/activity.py",  # when an incident was, as a page shows it
    "compress/evaluation/quality_measurement.py",  # the date of a passport
    "server/run.py", "core/running.py",  # since when a server runs, which another process is told
    "store/pull.py", "cli/stored.py",  # when a model was pulled
}  # fmt: skip
"""Where the time of day is asked for: ages of files, `created` in replies, the date in a prompt; when something was
measured, recorded or logged.
"""


@pytest.mark.slow
def test_a_killed_server_leaves_nothing_and_starts_again_at_once() -> None:
    """T14. Its small scale: test_kill_9_of_the_server_leaves_nothing."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    took = []
    for _ in range(50 if FULL else 3):
        with Serving(port=port) as server, server.up() as client:
            assert client.base_url.port == port
            with client.stream("POST", "/v1/completions", json=asked(1, 400) | {"ignore_eos": True}) as reply:
                next(reply.iter_lines())
                ours = [server.process.pid, *children(server.process.pid)]
                began = time.monotonic()
                server.process.kill()
                server.process.wait()
                wait_until(lambda ours=ours: all(map(gone, ours)), seconds=10)  # type: ignore[misc]
                took.append(time.monotonic() - began)
    print(f"\nT14: {len(took)} kills, all children gone within {max(took):.2f} s")
    assert max(took) <= 2.0 and not any(Path(f"/proc/{pid}").exists() and not gone(pid) for pid in ours)


async def drained(server: StubServer, count: int, length: int) -> tuple[list[Answer], float]:
    """SIGTERM under `count` streams: their answers, and after how long /readyz said so."""
    streams = [asyncio.create_task(ask(server.port, request(asked(i, length)))) for i in range(count)]
    while await asyncio.to_thread(lambda: server.in_flight) < count:
        await asyncio.sleep(0.02)
    server.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    ready = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    while (await ask(server.port, ready)).status != 503:
        assert time.monotonic() - began < 5
    late = time.monotonic() - began
    refused = await ask(server.port, request(asked(0, 2)))
    assert refused.status == 503 and refused.headers["retry-after"]
    return await asyncio.gather(*streams), late


@pytest.mark.slow
def test_sigterm_under_hundreds_of_streams_loses_none() -> None:
    """T16. Its small scale: test_sigterm_finishes_what_runs_refuses_what_comes_and_exits_with_0."""
    late = []
    for _ in range(100 if FULL else 2):
        with StubServer(0.02, ROOMY, shutdown_timeout=60.0) as server:
            answers, seconds = asyncio.run(drained(server, 200, 100))
            late.append(seconds)
            for i, answer in enumerate(answers):
                assert answer.done and answer.text == alone([8 + i % 200, 9], i, 100), i
            assert server.process.wait(10) == 0
    print(f"\nT16: {len(late)} drains, /readyz says 503 within {1e3 * max(late):.0f} ms")
    assert max(late) < 1.0


@pytest.mark.slow
def test_a_second_sigterm_under_hundreds_of_streams_ends_soon() -> None:
    """T16."""

    async def run(server: StubServer) -> float:
        streams = [asyncio.create_task(ask(server.port, request(asked(i, 200)))) for i in range(200)]
        while await asyncio.to_thread(lambda: server.in_flight) < 200:
            await asyncio.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        answers = await asyncio.gather(*streams)
        assert all(b"event: error" in a.body and not a.done for a in answers)
        assert await asyncio.to_thread(server.process.wait, 10) == 1
        return time.monotonic() - began

    with StubServer(0.05, ROOMY, shutdown_timeout=60.0) as server:
        took = asyncio.run(run(server))
    print(f"\nT16: the second signal ended it within {took:.2f} s")
    assert took <= 2.0


@pytest.mark.parametrize("jump", [3600.0, -3e8])
def test_no_timeout_heeds_the_time_of_day(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """T22: hours and years, back and forth, under load."""
    wall, over, offset = time.time, threading.Event(), [0.0]
    monkeypatch.setattr(time, "time", lambda: wall() + offset[0])

    def jumping() -> None:
        while not over.wait(0.01):
            offset[0] = jump if not offset[0] else 0.0

    async def streams(port: int) -> list[Answer]:
        return list(await asyncio.gather(*(ask(port, request(asked(i, 40))) for i in range(20))))

    jumps = threading.Thread(target=jumping)
    limits = {"body_timeout": 2.0, "header_timeout": 2.0, "write_timeout": 2.0, "stall_timeout": 2.0}
    with live(StubEngine(step_seconds=0.005), **limits) as server:
        jumps.start()
        answers = asyncio.run(streams(server.port))
        assert server.http.get("/readyz").status_code == 200
        over.set()
        jumps.join()
    assert all(a.done and a.text == alone([8 + i % 200, 9], i, 40) for i, a in enumerate(answers))
    assert not server.stub.aborted


def test_the_time_of_day_is_asked_for_in_few_places() -> None:
    """T22: everything else counts with `time.monotonic`."""
    words = ("time.time(", "datetime.now(", "utcnow(", "time.time_ns(")
    found = {str(p.relative_to(SOURCE)) for p in SOURCE.rglob("*.py") if any(w in p.read_text() for w in words)}
    assert found == WALL_CLOCK
