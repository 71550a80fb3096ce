"""Several models with an engine process each: loads that take turns, an engine that is killed, the end of them all."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from live_server import wait_until
from quire.cli.flags import to_arguments
from quire.cli.serve import start_engines
from quire.core.config import EngineConfig
from quire.engine.client import EngineClient
from quire.server.server_options import ServerOptions
from several_models import Server, list_of, serving
from tiny_model import OPTIONS, write_tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for long texts."""
    path = write_tiny(tmp_path_factory.mktemp("tiny"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return path


def test_with_room_for_one_of_two_no_request_is_lost(folder: Path) -> None:
    budget = 0.05
    models = list_of(folder, "ab", num_blocks=0, models_memory_gb=budget)  # half of the budget, and weights
    start = partial(start_engines, ServerOptions())

    def client(server: Server, number: int) -> list[str]:
        return [server.complete("ab"[(number + i) % 2], seed=1) for i in range(10)]

    with serving(models, start, models_memory_gb=budget) as server, ThreadPoolExecutor(10) as pool:
        texts = [text for found in pool.map(partial(client, server), range(10)) for text in found]
        [service] = server.state.loaded
        info, planned = service.engine.info, service.config.cache.kv_cache_memory_bytes
        assert 0.99 * planned < info.num_blocks * info.block_size * info.kv_bytes_per_token <= planned < 25e6
        assert len(texts) == 100 and set(texts) == {texts[0]}
        assert sorted(server.states().values()) == ["loaded", "unloaded"]
        assert all(model.loads > 1 for model in server.state.pool.models.values())


class Noted:
    """Starts engines, and notes the process of each model's."""

    def __init__(self) -> None:
        self.clients: dict[str, Any] = {}

    def __call__(self, until: ExitStack, config: EngineConfig) -> EngineClient:
        """Start one (`StartEngine`)."""
        [name] = config.model.served_model_name
        self.clients[name] = client = start_engines(ServerOptions(), until, config)
        return client

    def pid(self, name: str) -> int:
        """Of the engine that runs now."""
        return int(self.clients[name]._engine.channel.process.pid)


def test_a_killed_engine_comes_back_and_the_others_streams_go_on(folder: Path) -> None:
    start = Noted()
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "seed": 1, "stream": True}
    with serving(list_of(folder, "ab", num_blocks=1024), start) as server, ThreadPoolExecutor(4) as pool:
        alone = "".join(_streamed(server, body | {"model": "b"}))
        assert alone == "".join(_streamed(server, body | {"model": "a"}))
        streams = [_streamed(server, body | {"model": name}) for name in "aabb"]
        begun = [next(stream) for stream in streams]
        killed, other = start.pid("a"), start.pid("b")
        os.kill(killed, signal.SIGKILL)
        texts = list(pool.map(lambda i: begun[i] + "".join(streams[i]), range(4)))
        assert texts == [alone] * 4
        wait_until(lambda: not _there(killed))
        assert start.pid("b") == other and _there(other)
        assert start.pid("a") != killed and _there(start.pid("a"))
        metrics = server.http.get("/metrics").text
        for name, count in (("a", 1), ("b", 0)):
            assert f'quire:engine_restarts_total{{engine="0",model_name="{name}"}} {count}.0' in metrics
        assert set(server.states().values()) == {"loaded"}


def _streamed(server: Server, body: dict[str, Any]) -> Iterator[str]:
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                yield cast(str, json.loads(line[6:])["choices"][0]["text"])


def _there(pid: int) -> bool:
    """Whether a process runs: one that has ended may wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _children(pid: int) -> set[int]:
    found = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return {int(child) for text in found for child in text.split()}


@pytest.mark.parametrize("when", ["a stream runs", "a model is loading"])
def test_a_signal_ends_all(folder: Path, tmp_path: Path, when: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = tmp_path / "models.toml"
    file.write_text(f'[models.a]\nmodel = "{folder}"\n[models.b]\nmodel = "{folder}"\npinned = true\n')
    flags = to_arguments(OPTIONS | {"num_blocks": 512, "models": str(file), "port": port, "shutdown_timeout": 20})
    process = subprocess.Popen([sys.executable, "-m", "quire", "serve", *flags], stderr=subprocess.PIPE)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            wait_until(lambda: _answers(client, "/livez"), seconds=60)
            if when == "a model is loading":
                wait_until(lambda: len(_children(process.pid)) >= 1)
                process.send_signal(signal.SIGTERM)
            else:
                wait_until(lambda: _answers(client, "/readyz"), seconds=60)
                body = {"model": "b", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
                with client.stream("POST", "/v1/completions", json=body) as stream:
                    lines = stream.iter_lines()
                    next(lines)
                    process.send_signal(signal.SIGTERM)
                    assert "data: [DONE]" in list(lines)
        children = _children(process.pid)
        began = time.monotonic()
        process.wait(30)
        assert process.returncode == 0 and time.monotonic() - began < 10
        wait_until(lambda: not any(map(_there, children)))
    finally:
        process.kill()
        process.communicate()


def _answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.TransportError:
        return False
