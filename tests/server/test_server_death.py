"""What clients and supervisors see when the engine dies: every request ends with an error, and the server exits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from live_server import FOLDER, LiveServer, live, open_stream, read_all, wait_until
from quire.core.errors import ConfigError, EngineFailure
from quire.engine.engine_options import engine_config
from quire.engine.processes.process import ProcessEngine
from serving_process import Serving, children, gone
from stub_engine import StubEngine
from tiny_model import OPTIONS, write_tiny


def ask(server: LiveServer, method: str, path: str, **more: Any) -> httpx.Response:
    """A request to the application itself, which answers after its server has ended, too."""
    transport = httpx.ASGITransport(app=server.app)

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    return asyncio.run(send())


def test_an_engine_that_dies_ends_every_request_with_an_error_and_then_the_server() -> None:
    stub = StubEngine(step_seconds=0.01)
    with live(stub) as server:
        running = open_stream(server)
        wait_until(lambda: server.engine.metrics.steps.stats.generation_tokens > 3)
        stub.dead = True
        text = read_all(running)
        assert "event: error\ndata: " in text and "[DONE]" not in text and '"engine_error"' in text
        wait_until(lambda: not server.thread.is_alive())
        reply = ask(server, "POST", "/v1/completions", json={"prompt": "a"})
        assert reply.status_code == 503 and reply.headers["retry-after"]
        health = ask(server, "GET", "/health")
        assert health.status_code == 503 and health.json()["status"] == "no engine answers now"
        ready = ask(server, "GET", "/readyz")
        assert ready.status_code == 503 and ready.json()["checks"]["engine alive"] is False
        assert ask(server, "GET", "/livez").status_code == 200
        assert "quire:engine_healthy{" in ask(server, "GET", "/metrics").text
        assert ask(server, "GET", "/v1/models/stub").json()["status"] == "failed"


def test_a_dead_engine_before_the_first_token_is_a_plain_500() -> None:
    stub = StubEngine()
    stub.paused = True
    with live(stub) as server:
        waiting = [open_stream(server), open_stream(server)]
        wait_until(lambda: server.engine.in_flight == 2)
        stub.dead = True
        for sock in waiting:
            text = sock.recv(65536).decode()
            assert text.startswith("HTTP/1.1 500") and '"engine_error"' in text
            sock.close()


LONG = {"prompt": "def main(", "max_tokens": 900, "ignore_eos": True}


def running(client: httpx.Client) -> float:
    """Sequences in the batch."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def test_kill_9_of_an_engine_that_may_not_die() -> None:
    with Serving("--max-engine-deaths", "1") as server, server.up() as client, ThreadPoolExecutor(12) as pool:
        bodies = [LONG | {"stream": i < 8} for i in range(12)]
        replies = [pool.submit(client.post, "/v1/completions", json=body) for body in bodies]
        wait_until(lambda: running(client) == 12)
        os.kill(server.engine, signal.SIGKILL)
        for body, future in zip(bodies, replies, strict=True):
            reply = future.result(timeout=10)
            if body["stream"]:
                assert reply.status_code == 200 and "event: error" in reply.text and "[DONE]" not in reply.text
            else:
                assert reply.status_code == 500 and reply.json()["error"]["type"] == "engine_error"
        assert server.process.wait(5) == 1
    errors = [line for line in server.log if " ERROR " in line]
    assert len(errors) == 1 and "the engine process was killed by SIGKILL" in errors[0], server.log
    assert "Traceback" not in "".join(server.log)


def test_a_signal_to_all_processes_drains_as_one_to_the_server() -> None:
    """systemd stops a service like that, and a terminal sends Ctrl-C to all it started."""
    with Serving() as server, server.up() as client, ThreadPoolExecutor(2) as pool:
        replies = [pool.submit(client.post, "/v1/completions", json=LONG | {"stream": s}) for s in (True, False)]
        wait_until(lambda: running(client) == 2)
        engine = server.engine
        for pid in (engine, server.process.pid):
            os.kill(pid, signal.SIGTERM)
        whole = [reply.result(timeout=20) for reply in replies]
        assert "[DONE]" in whole[0].text and whole[1].json()["usage"]["completion_tokens"] == 900
        assert server.process.wait(5) == 0
        assert gone(engine)


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Addresses (hexadecimal) and ports on which processes take connections from other machines or users."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                inodes.add(str(file.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in inodes and (words[3] == "0A" or table.startswith("udp")):
                address, _, port = words[1].partition(":")
                found.add((address, int(port, 16)))
    return found


def sockets(pid: int, end: str) -> list[Path]:
    """Unix sockets that a process has bound, by the ends of their paths."""
    mine = {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if line.endswith(end)]
    return sorted({Path(line[-1]) for line in lines if f"socket:[{line[6]}]" in mine})


def test_kill_9_of_the_server_leaves_nothing() -> None:
    """T14 at a small scale; and nothing but the port that was asked for is listened on (T25)."""
    with Serving() as server, server.up() as client:
        engine, helpers = server.engine, children(server.process.pid)
        assert listening([server.process.pid, *helpers]) == {("0100007F", client.base_url.port)}
        (inbox,) = sockets(server.process.pid, "/to")
        directory = inbox.parent
        assert directory.is_dir() and engine in helpers
        server.process.kill()
        wait_until(lambda: all(map(gone, helpers)) and not directory.exists())


def test_ctrl_c_while_the_model_is_loaded_leaves_nothing() -> None:
    with Serving() as server:
        wait_until(lambda: bool(server.engines()), seconds=20)
        engine = server.engine
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(5) == 130
        wait_until(lambda: gone(engine), seconds=20)
    assert server.log == []


def test_ctrl_c_twice_under_load_ends_at_once() -> None:
    with Serving() as server, server.up() as client, ThreadPoolExecutor(1) as pool:
        reply = pool.submit(client.post, "/v1/completions", json=LONG | {"stream": True, "n": 8})
        wait_until(lambda: running(client) == 8)
        engine = server.engine
        os.killpg(server.process.pid, signal.SIGINT)
        time.sleep(0.2)
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(3) == 1
        assert gone(engine)
        with contextlib.suppress(httpx.TransportError):
            assert "[DONE]" not in reply.result(timeout=5).text
    assert "Traceback" not in "".join(server.log)


def test_a_deaf_engine_is_a_failure_and_not_an_internal_error(tmp_path: Path) -> None:
    """Its sockets may be closed a moment before it counts as ended."""
    with contextlib.closing(
        ProcessEngine(engine_config({"model": write_tiny(tmp_path / "tiny"), **OPTIONS}))
    ) as engine:
        process = engine.channel.process
        os.kill(process.pid, signal.SIGSTOP)
        process.ended = lambda: None  # type: ignore[method-assign]
        os.kill(process.pid, signal.SIGKILL)
        end = time.monotonic() + 5
        with pytest.raises(EngineFailure, match="not listening"):
            while time.monotonic() < end:
                engine.abort("unknown")


def test_a_directory_where_no_socket_can_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        ProcessEngine(engine_config({"model": str(FOLDER)}))
    assert list(deep.iterdir()) == []
