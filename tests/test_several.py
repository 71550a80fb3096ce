"""Several models in one server: who is loaded when, who waits for whom, and that none loses a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from live_server import wait_until
from quire.cli.models import listed_models
from quire.cli.serve import start_engines
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, ModelError, QuireError, Unavailable
from quire.engine.client import EngineClient
from quire.server.http.address import bind
from quire.server.options import ServerOptions
from quire.server.run import DrainingServer, uvicorn_config
from quire.server.several.pool import Listed, Pool
from quire.server.several.run import make_several
from stub_engine import StubEngine, stub_info
from tiny_model import OPTIONS, write_tiny


class Model:
    """A loaded model that does nothing."""

    def __init__(self) -> None:
        self.busy, self.closed = False, False
        self.failure: QuireError | None = None

    def close(self) -> None:
        self.closed = True


def listed(name: str, needed: int = 1, pinned: bool = False) -> Listed:
    return Listed(name=name, config=EngineConfig(), needed=needed, pinned=pinned)


def test_alternating_requests_take_turns_within_the_budget() -> None:
    loaded: list[str] = []

    def start(model: Listed) -> Model:
        loaded.append(model.name)
        return Model()

    async def run() -> int:
        pool, served, most = Pool([listed("a"), listed("b")], start, budget=1), 0, 0

        async def one(i: int) -> None:
            nonlocal served, most
            async with pool.use("ab"[i % 2]):
                most = max(most, sum(slot.running is not None for slot in pool.slots.values()))
                await asyncio.sleep(0.001)
                served += 1

        await asyncio.gather(*map(one, range(100)))
        assert most == 1
        return served

    assert asyncio.run(run()) == 100
    assert {"a", "b"} == set(loaded)


def test_the_least_recently_used_makes_room_and_pinned_ones_stay() -> None:
    async def run() -> None:
        pool = Pool([listed("a", pinned=True), *map(listed, "bcd")], lambda _: Model(), budget=3)
        for name in "abcbd":
            async with pool.use(name):
                pass
        assert [n for n, slot in pool.slots.items() if slot.state == "loaded"] == ["a", "b", "d"]

    asyncio.run(run())


def test_a_model_that_cannot_load_says_why_and_is_tried_again() -> None:
    tries = 0

    def start(_: Listed) -> Model:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ModelError("config.json: gone")
        return Model()

    async def run() -> None:
        pool = Pool([listed("a")], start)
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"config\.json: gone; it is tried again in 1 s"):
                async with pool.use("a"):
                    pass
        assert tries == 1
        await pool.load("a")
        assert pool.slots["a"].state == "loaded" and tries == 2

    asyncio.run(run())


def test_waiting_for_a_load_is_bounded() -> None:
    go = threading.Event()

    def start(_: Listed) -> Model:
        go.wait(5)
        return Model()

    async def run() -> None:
        pool = Pool([listed("a")], start, wait=0.05)
        with pytest.raises(Unavailable, match="not loaded within"):
            async with pool.use("a"):
                pass
        go.set()

    asyncio.run(run())


def test_what_can_never_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'big' needs 2 GB; raise it"):
        Pool([listed("big", 2_000_000_000)], lambda _: Model(), budget=10**9)
    with pytest.raises(ConfigError, match="'a' is there twice"):
        Pool([listed("a"), listed("a")], lambda _: Model())
    file = tmp_path / "models.toml"
    for text, message in {
        "models = [": "not TOML",
        "other = 1": r"tables \[models.NAME\]",
        "[models.a]\nmodl = 'x'": "'a': modl: there is no such option",
        "[models.a]\ndtype = 'auto'": "'a': it needs a name and model",
        "": r"tables \[models.NAME\]",
    }.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=message) as error:
            listed_models(str(file), [], {})
        assert "\n" not in error.value.message
    tiny = write_tiny(tmp_path / "tiny")
    [model] = listed_models(None, [f"t={tiny},pinned=true,max-model-len=64,dtype=float32"], OPTIONS)
    assert model.pinned and model.config.model.max_model_len == 64 and model.needed > 0


@contextlib.contextmanager
def serving(models: list[Listed], start: Any, **options: Any) -> Iterator[httpx.Client]:
    own = ServerOptions(port=0, **options)
    several, app = make_several(models, own, start)
    sock = bind(own)
    server = DrainingServer(uvicorn_config(app, own), several)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(20)
        sock.close()
        assert not thread.is_alive()


def test_http_over_stub_engines(tmp_path: Path) -> None:
    folder = str(write_tiny(tmp_path / "tiny"))
    engines: dict[str, StubEngine] = {}

    def start(_: ExitStack, config: EngineConfig) -> EngineClient:
        name = config.model.served_model_name[0]
        engines[name] = StubEngine(stub_info(folder=folder, served_name=name, vocab_size=260, max_model_len=100))
        return engines[name]

    models = [Listed(name=n, config=c, needed=1) for n in "ab" for c in [_config(folder, n)]]
    keys = tmp_path / "keys.json"
    keys.write_text('{"user": {"key": "u"}, "boss": {"key": "b", "admin": true}}')
    boss, user = {"authorization": "Bearer b"}, {"authorization": "Bearer u"}
    with serving(models, start, api_keys_file=str(keys)) as client:
        assert client.get("/readyz").status_code == 200
        assert client.get("/v1/models").status_code == 401
        client.headers.update(user)
        assert [m["status"] for m in client.get("/v1/models").json()["data"]] == ["unloaded"] * 2
        body = {"model": "b", "prompt": "x", "max_tokens": 3}
        assert client.post("/v1/completions", json=body).json()["model"] == "b"
        assert client.post("/tokenize", json={"model": "a", "prompt": "xy"}).json()["count"] == 2
        assert client.post("/v1/models/unload", json={"model": "a"}).status_code == 403
        assert client.post("/v1/models/unload", json={"model": "a"}, headers=boss).json()["status"] == "unloaded"
        assert engines["a"].closed
        assert client.get("/v1/models/b").json()["status"] == "loaded"
        missing = client.post("/v1/completions", json=body | {"model": "c"})
        assert missing.status_code == 404 and "there are 'a', 'b'" in missing.json()["error"]["message"]
        assert client.post("/v1/models/load", json={"model": "a"}, headers=boss).json()["status"] == "loaded"
        text = client.get("/metrics").text
        assert text.count("# TYPE vllm:num_requests_running gauge") == 1
        assert all(f'vllm:num_requests_running{{engine="0",model_name="{n}"}}' in text for n in "ab")
        engines["a"].dead = True
        assert client.post("/v1/completions", json=body | {"model": "a"}).status_code in (500, 503)
        assert client.post("/v1/completions", json=body).status_code == 200
        assert {m["id"]: m["status"] for m in client.get("/v1/models").json()["data"]} == {"a": "failed", "b": "loaded"}


def children() -> set[int]:
    """Processes that this one started."""
    found = (path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    return {int(pid) for text in found for pid in text.split()}


def _config(folder: str, name: str) -> EngineConfig:
    [model] = listed_models(None, [f"{name}={folder}"], OPTIONS)
    return model.config


@pytest.mark.slow
def test_a_killed_engine_leaves_the_others_streams_alone(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    models = listed_models(None, [f"{n}={folder}" for n in "ab"], OPTIONS)
    pids: list[set[int]] = []

    def start(until: ExitStack, config: EngineConfig) -> EngineClient:
        before = children()
        engine = start_engines(ServerOptions(), until, config)
        pids.append(children() - before)
        return engine

    body = {"model": "b", "prompt": "x", "max_tokens": 100, "ignore_eos": True, "seed": 1}
    with serving(models, start) as client:
        assert client.post("/v1/completions", json=body | {"model": "a", "max_tokens": 1}).status_code == 200
        alone = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        text = ""
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            for i, line in enumerate(line for line in stream.iter_lines() if line.startswith("data: {")):
                if i == 0:
                    for pid in pids[0]:
                        os.kill(pid, signal.SIGKILL)
                text += json.loads(line[6:])["choices"][0]["text"]
        assert text == alone
        assert client.post("/v1/completions", json=body | {"model": "a", "max_tokens": 1}).status_code == 200
