"""A server of one model is a pool of one, whose model stays: what it says of that model, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live_server import LiveServer, live
from quire.core.errors import EngineFailure, QuireError
from quire.server.http.errors import HttpError
from quire.server.models import dispatch
from quire.server.models.pool import Pool
from several_models import entry
from stub_engine import StubEngine, stub_info


class Model:
    """A loaded model that does nothing."""

    busy = False

    def __init__(self) -> None:
        self.failure: QuireError | None = None
        self.begun = self.closed = False

    def begin(self) -> None:
        self.begun = True

    def close(self) -> None:
        self.closed = True


def test_the_pool_neither_loads_nor_ends_its_model() -> None:
    async def whole_life() -> None:
        running = Model()
        pool = Pool.of_one(entry("a"), running)
        await pool.start()
        assert running.begun and pool.permanent is pool.models["a"] and pool.models["a"].state == "loaded"
        await pool.load("a")
        with pytest.raises(HttpError, match="loaded until the server ends") as refused:
            await pool.unload("a")
        assert refused.value.status == 409
        running.failure = EngineFailure("it died")
        pool.note_failures()
        assert pool.models["a"].state == "failed" and "its engine failed" in pool.models["a"].error
        assert pool.models["a"].running is running and pool.models["a"].loads == 1
        await pool.close()
        assert not running.closed

    asyncio.run(whole_life())


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    info = stub_info(adapters=("x",), kv_cache_bytes=500)
    with live(StubEngine(info), served_model_name=("stub", "second")) as found:
        yield found


def test_cards_have_the_state(server: LiveServer) -> None:
    cards = server.http.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("stub", None), ("second", None), ("x", "stub")]
    for card in cards:
        assert card["status"] == "loaded" and card["pinned"] and card["error"] is None
        assert card["needed_bytes"] == server.engine.info.weight_bytes + 500
        assert card == server.http.get(f"/v1/models/{card['id']}").json()
    assert server.http.get("/v1/models/second:latest").json()["id"] == "second"
    refused = server.http.get("/v1/models/c")
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == "model: 'c' is not served here; this is 'stub'"


def test_its_model_is_loaded_and_is_not_unloaded(server: LiveServer) -> None:
    for name in ("stub", "second", "x"):
        assert server.post("/v1/models/load", {"model": name}).json() == server.http.get("/v1/models/stub").json()
        refused = server.post("/v1/models/unload", {"model": name})
        assert refused.status_code == 409 and refused.json()["error"]["param"] == "model"
        assert "'stub' is loaded until the server ends" in refused.text
    for path in ("/v1/models/load", "/v1/models/unload"):
        assert server.post(path, {"model": "c"}).status_code == 404
    assert server.complete(max_tokens=1)["model"] == "stub"


def test_a_key_that_is_no_administrators_may_not_ask_for_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"user": {"key": "u"}, "boss": {"key": "b", "admin": true}}')
    with live(api_keys_file=str(keys)) as server:
        for key, load, unload in (("u", 403, 403), ("b", 200, 409)):
            headers = {"authorization": f"Bearer {key}"}
            for path, status in (("/v1/models/load", load), ("/v1/models/unload", unload)):
                assert server.post(path, {"model": "stub"}, headers=headers).status_code == status


def test_metrics_have_the_state_and_each_family_once(server: LiveServer) -> None:
    server.complete(max_tokens=2)
    text = server.http.get("/metrics").text
    assert 'quire:model_state{model_name="stub",state="loaded"} 1.0' in text
    assert 'quire:model_loads_total{model_name="stub"} 1.0' in text
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    assert {"http_requests_total", "vllm:num_requests_running", "process_resident_memory_bytes"} <= set(families)


def test_nothing_of_a_request_is_read_to_choose_a_model(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a model was chosen")

    for name in ("read_bytes", "read_json", "shaped"):
        monkeypatch.setattr(dispatch, name, refuse)
    assert server.post("/v1/completions?model=c", {"prompt": "a", "max_tokens": 1}).status_code == 200
    assert server.http.get("/props?model=c").status_code == 200
