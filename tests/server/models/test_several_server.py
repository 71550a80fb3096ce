"""A server of several models over stub engines: each request reaches the model that it is for, and lists name all."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from live_server import wait_until
from quire.cli.models import model_entries
from quire.core.errors import ConfigError
from quire.server.models.entry import ModelEntry
from several_models import Server, Stubs, list_of, serving
from tiny_model import OPTIONS, write_tiny

MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 20},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/api/generate": {"prompt": "x", "options": {"num_predict": 2}, "stream": False},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 2}, "stream": False},
    "/completion": {"prompt": "x", "n_predict": 2},
}
"""Those that generate."""
TOLD: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/messages/count_tokens": ({"messages": MESSAGES}, '"input_tokens"'),
    "/v1/embeddings": ({"input": "x"}, "b makes none"),
    "/v1/score": ({"text_1": "x", "text_2": "y"}, "b makes none"),
    "/score": ({"text_1": "x", "text_2": "y"}, "b makes none"),
    "/v1/rerank": ({"query": "x", "documents": ["y"]}, "b makes none"),
    "/rerank": ({"query": "x", "documents": ["y"]}, "b makes none"),
    "/api/embed": ({"input": "x"}, "b makes none"),
    "/api/embeddings": ({"prompt": "x"}, "b makes none"),
    "/tokenize": ({"prompt": "xy"}, '"max_model_len":90'),
    "/detokenize": ({"tokens": [999]}, r"\[0, 261\)"),
    "/api/show": ({}, '"llama.context_length":90'),
}
"""Others that name a model, and what tells in their replies that it was b."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def stubs() -> Stubs:
    return Stubs()


@pytest.fixture(scope="module")
def server(folder: Path, stubs: Stubs) -> Iterator[Server]:
    models = list_of(folder, "ab", enable_lora=True, max_loras=2)
    leave = {"allow_runtime_lora_updating": True, "allow_reset_prefix_cache": True}
    with serving(models, stubs, **leave) as found:
        yield found


def test_a_body_names_its_model(server: Server, stubs: Stubs) -> None:
    for path, body in BODIES.items():
        for asked, name in (({"model": "b"}, "b"), ({"model": "a"}, "a"), ({"model": "b:latest"}, "b")):
            if ":" in asked["model"] and not path.startswith("/api"):
                continue
            reply = server.post(path, body | asked)
            assert reply.status_code == 200, (path, reply.text)
            assert stubs.asked() == name, path
            assert reply.json().get("model", asked["model"]) == asked["model"]
    for path, (body, told) in TOLD.items():
        assert re.search(told, server.post(path, body | {"model": "b"}).text), path
        assert re.search(told, server.post(path, body | {"model": "a"}).text) is None or "count" in path, path
    assert '"llama.context_length":90' in server.post("/api/show", {"name": "b"}).text
    stream = server.post("/v1/completions", {"prompt": "x", "model": "b", "stream": True, "max_tokens": 2})
    assert stream.text.endswith("data: [DONE]\n\n") and stubs.asked() == "b"


def test_forms_name_their_model(server: Server) -> None:
    for name, status, told in (("b", 400, "takes no audio"), ("zz", 404, "zz"), (None, 400, "takes no audio")):
        data = {} if name is None else {"model": name}
        reply = server.http.post("/v1/audio/transcriptions", files={"file": b"RIFF"}, data=data)
        assert reply.status_code == status and told in reply.text, reply.text
    assert server.http.post("/v1/audio/transcriptions", json={"model": "b"}).status_code == 415


def test_what_names_none_is_for_the_address_or_the_first(server: Server, stubs: Stubs) -> None:
    tgi = {"inputs": "x", "parameters": {"max_new_tokens": 2}}
    for path in ("/generate", "/generate_stream", "/", "/completion", "/v1/completions"):
        body = BODIES.get(path, tgi)
        for query, name in (("", "a"), ("?model=b", "b")):
            assert server.post(path + query, body).status_code == 200, path
            assert stubs.asked() == name, path
    for path, found in (("/props", "n_ctx"), ("/slots", "n_ctx"), ("/info", "max_total_tokens")):
        for query, length in (("", 100), ("?model=b", 90)):
            assert f'"{found}":{length}' in server.http.get(path + query).text, path
    for query in ("", "?model=b", "?model=b"):
        assert server.post(f"/reset_prefix_cache{query}").status_code == 200
    assert (stubs.engines["a"].resets, stubs.engines["b"].resets) == (1, 2)


def test_what_is_wrong_is_said_without_a_model(folder: Path) -> None:
    stubs = Stubs()
    with serving(list_of(folder, "ab"), stubs) as server:
        for path, body in BODIES.items():
            missing = server.post(path, body | {"model": "c"})
            assert missing.status_code == 404 and "'c' is not served here; there are 'a', 'b'" in missing.text, path
        odd = server.post("/v1/completions", {"model": 5, "prompt": "x"})
        assert odd.status_code == 400 and odd.json()["error"]["param"] == "model"
        headers = {"content-type": "application/json"}
        for data in (b"{", b"[1]", b'{"model": "a", "prompt": "x"'):
            assert server.http.post("/v1/completions", content=data, headers=headers).status_code == 400, data
        assert server.http.post("/v1/completions", content=b"{}").status_code == 415
        assert server.http.get("/favicon.ico").status_code == 404
        assert server.http.get("/v1/completions").status_code == 405
        assert server.http.get("/v1/models/c").status_code == 404
        assert server.http.get("/v1/responses/resp_1").status_code == 404
        assert server.http.get("/props?model=c").status_code == 404
        described = server.http.get("/openapi.json").json()
        assert {"/v1/completions", "/v1/models/load", "/slots"} <= set(described["paths"])
        assert server.http.get("/").text.startswith("<!doctype html>")
        assert not stubs.loaded


def test_lists_name_all_and_nothing_is_loaded_for_them(folder: Path) -> None:
    stubs = Stubs()
    with serving(list_of(folder, "ab"), stubs) as server:
        for path in ("/health", "/ping", "/livez", "/readyz", "/load", "/version", "/api/version"):
            assert server.http.get(path).status_code == 200, path
        assert server.states() == {"a": "unloaded", "b": "unloaded"}
        assert [m["name"] for m in server.http.get("/api/tags").json()["models"]] == ["a", "b"]
        assert server.http.get("/api/ps").json() == {"models": []} and not stubs.loaded
        server.complete("b")
        card = server.http.get("/v1/models/b").json()
        assert card["status"] == "loaded" and card["max_model_len"] == 90 and not card["pinned"]
        assert card["needed_bytes"] > 0 and card["parent"] is None and card["object"] == "model"
        tags = server.http.get("/api/tags").json()["models"]
        assert tags[1]["details"]["family"] == "llama" and tags[0]["digest"] != tags[1]["digest"]
        assert [m["name"] for m in server.http.get("/api/ps").json()["models"]] == ["b"]


def test_one_metrics_has_all_models(server: Server) -> None:
    server.complete("a")
    server.complete("b")
    text = server.http.get("/metrics").text
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    assert text.count("\nprocess_resident_memory_bytes ") == 1
    for name in "ab":
        assert f'vllm:num_requests_running{{engine="0",model_name="{name}"}}' in text
        assert f'quire:model_state{{model_name="{name}",state="loaded"}} 1.0' in text
        assert f'quire:model_loads_total{{model_name="{name}"}} 1.0' in text
        assert re.search(rf'vllm:generation_tokens_total{{engine="0",model_name="{name}"}} [1-9]', text)
    assert re.search(r'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} \d', text)


def test_responses_are_found_whoever_made_them(folder: Path) -> None:
    stubs = Stubs(step_seconds=0.01)
    with serving(list_of(folder, "ab"), stubs, shutdown_timeout=0.0) as server:
        body = BODIES["/v1/responses"] | {"model": "b"}
        made = server.post("/v1/responses", body).json()["id"]
        slow = {**body, "max_output_tokens": 60, "background": True}
        running = server.post("/v1/responses", slow).json()["id"]
        wait_until(lambda: server.state.active == 1)
        assert server.http.get(f"/v1/responses/{running}").json()["status"] == "in_progress"
        assert server.post(f"/v1/responses/{running}/cancel").json()["status"] == "cancelled"
        wait_until(lambda: server.state.active == 0)
        follows = server.post("/v1/responses", body | {"model": "a", "previous_response_id": made})
        assert follows.status_code == 200
        assert server.post("/v1/models/unload", {"model": "b"}).json()["status"] == "unloaded"
        assert server.http.get(f"/v1/responses/{made}").json()["model"] == "b"
        assert server.http.delete(f"/v1/responses/{made}").json()["deleted"]
        assert stubs.loaded == ["b", "a"]


def test_adapters_belong_to_their_models_and_outlive_an_unload(server: Server, stubs: Stubs) -> None:
    load = {"lora_name": "x", "lora_path": "folder"}
    assert server.post("/v1/load_lora_adapter", load | {"model": "b"}).status_code == 200
    assert server.http.get("/v1/models/x").json()["parent"] == "b"
    stubs.asked()
    server.complete("x")
    assert stubs.asked() == "b"
    tgi = {"inputs": "x", "parameters": {"max_new_tokens": 2, "adapter_id": "x"}}
    assert server.post("/generate", tgi).status_code == 200 and stubs.asked() == "b"
    for body, message in (
        (load | {"model": "a"}, "'x' belongs to model 'b'"),
        (load, "'x' is loaded; set load_inplace"),
        (load | {"lora_name": "a"}, "'a' is the model's own name"),
        (load | {"lora_name": "a", "model": "b"}, "'a' belongs to model 'a'"),
        (load | {"model": "c"}, "'c' is not served here"),
        (load | {"lora_name": "y=z", "model": "b"}, "'y=z' must hold no ="),
    ):
        reply = server.post("/v1/load_lora_adapter", body)
        assert reply.status_code in (400, 404) and message in reply.text, reply.text
    server.post("/v1/models/unload", {"model": "b"})
    assert server.states() == {"a": "loaded", "b": "unloaded", "x": "unloaded"}
    stubs.asked()
    server.complete("x")
    assert stubs.asked() == "b" and stubs.loaded.count("b") == 2
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "x"}).status_code == 200
    server.post("/v1/models/unload", {"model": "b"})
    server.complete("b")
    assert set(server.states()) == {"a", "b"}


def test_keys_of_administrators_load_and_unload(folder: Path, tmp_path: Path) -> None:
    stubs, keys = Stubs(), tmp_path / "keys.json"
    keys.write_text('{"user": {"key": "u"}, "boss": {"key": "b", "admin": true}}')
    boss, user = {"authorization": "Bearer b"}, {"authorization": "Bearer u"}
    with serving(list_of(folder, "ab"), stubs, api_keys_file=str(keys)) as server:
        assert server.http.get("/v1/models").status_code == 401
        assert server.post("/v1/models/load", {"model": "a"}).status_code == 401
        server.http.headers.update(user)
        for path in ("/v1/models/load", "/v1/models/unload"):
            refused = server.post(path, {"model": "a"})
            assert refused.status_code == 403 and "admin" in refused.text
            assert server.post(path, {"model": "c"}, headers=boss).status_code == 404
            assert server.post(path, {}, headers=boss).status_code == 400
        keys.write_text("{")  # broken, and read again only when it is asked for
        assert server.post("/v1/models/load", {"model": "a"}, headers=boss).json()["status"] == "loaded"
        assert server.post("/v1/models/unload", {"model": "a"}, headers=boss).json()["status"] == "unloaded"
        assert stubs.engines["a"].closed and server.states() == {"a": "unloaded", "b": "unloaded"}
        server.complete("a")


def test_what_cannot_load_or_dies_harms_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.models.pool.FIRST_PAUSE", 100.0)
    stubs = Stubs(broken={"b"})
    with serving(list_of(folder, "ab"), stubs) as server:
        for path in ("/v1/completions", "/v1/messages"):
            refused = server.post(path, BODIES[path] | {"model": "b"})
            assert refused.status_code == 503 and 90 < int(refused.headers["retry-after"]) <= 100
            assert "'b' could not be loaded: config.json: there is no such file; it is tried again" in refused.text
        server.complete("a")
        card = server.http.get("/v1/models/b").json()
        assert (card["status"], card["error"]) == ("failed", "config.json: there is no such file")
        assert 'quire:model_state{model_name="b",state="failed"} 1.0' in server.http.get("/metrics").text
        stubs.broken.clear()
        assert server.post("/v1/models/load", {"model": "b"}).json()["error"] is None
        server.complete("b")
        stubs.engines["b"].dead = True
        wait_until(lambda: server.states() == {"a": "loaded", "b": "failed"})
        server.complete("a")
        refused = server.post("/v1/completions", BODIES["/v1/completions"] | {"model": "b"})
        assert refused.status_code == 503 and "the stub was told to die" in refused.text
        wait_until(lambda: stubs.engines["b"].closed == 2)  # by the engine, and by whoever started it
        assert server.post("/v1/models/load", {"model": "b"}).json()["status"] == "loaded"
        server.complete("b")


def test_alternating_clients_lose_nothing_with_room_for_one(folder: Path) -> None:
    stubs = Stubs()
    with serving(_sized(list_of(folder, "ab")), stubs, models_memory_gb=1.5) as server, ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda i: server.complete("ab"[i % 2], seed=1), range(100)))
        assert len(set(texts[::2])) == len(set(texts[1::2])) == 1
        assert sorted(server.states().values()) == ["loaded", "unloaded"]
        assert all(engine.closed for engine in stubs.engines.values() if engine.info.served_name != stubs.loaded[-1])


def test_a_client_that_leaves_waits_no_longer(folder: Path) -> None:
    stubs = Stubs(gates={"b": threading.Event()})
    with serving(list_of(folder, "ab"), stubs) as server:
        body = BODIES["/v1/completions"] | {"model": "b"}
        with pytest.raises(httpx.ReadTimeout):
            server.post("/v1/completions", body, timeout=0.2)
        wait_until(lambda: not server.state.pool.models["b"].waiting)
        assert server.states() == {"a": "unloaded", "b": "loading"}
        stubs.gates["b"].set()
        server.complete("b")


def test_a_drain_waits_for_all_and_its_end_is_told_to_who_waits(folder: Path) -> None:
    stubs = Stubs(step_seconds=0.01, gates={"b": threading.Event()})
    with serving(list_of(folder, "ab"), stubs, shutdown_timeout=60) as server, ThreadPoolExecutor(2) as pool:
        server.complete("a")
        long = pool.submit(server.complete, "a", max_tokens=40, ignore_eos=True)
        body = BODIES["/v1/completions"] | {"model": "b"}
        waits = pool.submit(server.post, "/v1/completions", body)
        wait_until(lambda: bool(server.state.pool.models["b"].waiting) and server.state.active == 2)
        server.server.handle_exit(signal.SIGTERM, None)
        assert not server.http.get("/readyz").json()["ready"]
        assert server.post("/v1/completions", body).status_code == 503
        assert len(long.result()) >= 20 and not waits.done()
        server.server.handle_exit(signal.SIGTERM, None)
        cut = waits.result()
        assert cut.status_code == 503 and "shutting down" in cut.text
        server.thread.join(10)
        assert not server.thread.is_alive() and stubs.loaded == ["a"] and stubs.engines["a"].closed


def test_pinned_models_are_loaded_at_the_start(folder: Path) -> None:
    stubs = Stubs(gates={"b": threading.Event()})
    models = model_entries(OPTIONS | {"model": [f"a={folder}", f"b={folder},pinned=true"]})
    with serving(models, stubs) as server:
        assert server.http.get("/readyz").status_code == 503
        stubs.gates["b"].set()
        wait_until(lambda: server.http.get("/readyz").status_code == 200)
        assert server.states() == {"a": "unloaded", "b": "loaded"}


def _sized(models: list[ModelEntry]) -> list[ModelEntry]:
    """Each needs a GB."""
    return [replace(model, needed_bytes=10**9) for model in models]


def test_lists_are_read(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        f"[models.one]\nmodel = {json.dumps(str(folder))}\npinned = true\nmax-model-len = 64\n"
        f'[models."two/b"]\nmodel = {json.dumps(str(folder))}\nreasoning_parser = "qwen3"\n'
    )
    given = [f"three={folder},max_model_len=32,enable-prefix-caching=false,max-num-seqs=3"]
    one, two, three = model_entries(OPTIONS | {"models": str(file), "model": given, "max_num_seqs": 7})
    assert (one.name, two.name, three.name) == ("one", "two/b", "three")
    assert one.pinned and not two.pinned and one.config.model.served_model_name == ("one",)
    assert [each.max_model_len for each in (one, two, three)] == [64, 128, 32]
    assert [each.config.scheduler.max_num_seqs for each in (one, two, three)] == [7, 7, 3]
    assert two.server_options["reasoning_parser"] == "qwen3" and one.server_options["reasoning_parser"] is None
    assert not three.config.cache.enable_prefix_caching and 0 < three.needed_bytes == one.needed_bytes - 32 * 16 * 4, (
        "ropes"
    )
    for alone in ({}, {"model": str(folder)}, {"model": [str(folder)]}):
        assert model_entries(OPTIONS | alone) == []


def test_a_budget_decides_the_kv_cache_of_models_that_give_no_size(folder: Path) -> None:
    options = {name: value for name, value in OPTIONS.items() if name != "num_blocks"}
    sized, own = model_entries(options | {"model": [f"a={folder}", f"b={folder},num_blocks=20"], "models_memory_gb": 1})
    weights = own.needed_bytes - 20 * 16 * 2 * 2 * 16 * 4  # tokens of a block, layers, keys and values, numbers, bytes
    assert 0 < weights < 200_000
    most = 64 * 128 * 2 * 2 * 16 * 4  # what 64 sequences of 128 tokens fill
    assert sized.needed_bytes == weights + most and sized.config.cache.kv_cache_memory_bytes == most
    [tight] = model_entries(options | {"model": [f"a={folder}"], "models_memory_gb": (weights + 200_000) / 1e9})
    assert weights + 90_000 < tight.needed_bytes <= weights + 100_000
    assert tight.max_model_len == 128
    with pytest.raises(ConfigError, match=r"model 'a': its weights take .* GB, of --models-memory-gb .* are left"):
        model_entries(options | {"model": [f"a={folder}"], "models_memory_gb": weights / 1e9})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = [", "not TOML"),
        ("other = 1", r"it must hold tables \[models\.NAME\]"),
        ("", r"it must hold tables \[models\.NAME\]"),
        ("[models]", r"it must hold tables \[models\.NAME\]"),
        ("[models]\na = 1", r"it must hold tables \[models\.NAME\]"),
        ("[models.a]\nmodl = 'x'", "model 'a': modl: a model has no such option; is it model?"),
        ("[models.a]\nmodel = 'FOLDER'\nport = 1", "model 'a': port: a model has no such option"),
        ("[models.a]\nmodel = 'FOLDER'\npinned = 1", "model 'a': pinned 1 must be true or false"),
        ("[models.a]\nmodel = 'FOLDER'\nblock_size = 3", "model 'a': --block-size 3"),
        ("[models.a]\nmodel = 'FOLDER'\ndtype = 5", "model 'a': --dtype 5 must be text"),
        ("[models.a]\ndtype = 'auto'", "model 'a': it needs a name and model = PATH"),
        ("[models.a]\nmodel = '/no/such/folder'", "model 'a': .*/no/such/folder"),
        ("[models.a]\nmodel = 'FOLDER'\nnnodes = 2\nmaster_addr = 'x'", "model 'a': .*nnodes"),
    ],
)
def test_mistakes_in_lists_are_one_line(folder: Path, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text.replace("FOLDER", str(folder)))
    with pytest.raises(ConfigError, match=message) as error:
        model_entries(OPTIONS | {"models": str(file)})
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": "/no/such/file"}, "--models /no/such/file: No such file"),
        ({"model": ["a=FOLDER,pinned"]}, "'pinned' is no option=value"),
        ({"model": ["a=FOLDER,num_blocks=many"]}, "model 'a': --num-blocks 'many' must be an integer"),
        ({"model": ["x", "y"]}, "several models: x and y; name each: --model NAME=PATH"),
        ({"model": ["a=FOLDER", "y"]}, "a model 'y' beside others"),
        ({"model": ["=FOLDER"]}, "model '': it needs a name"),
        ({"model": ["a=FOLDER"], "served_model_name": ["z"]}, "--served-model-name"),
    ],
)
def test_mistakes_of_the_command_line_are_one_line(folder: Path, options: dict[str, Any], message: str) -> None:
    text = json.loads(json.dumps(options).replace("FOLDER", str(folder)))
    with pytest.raises(ConfigError, match=message) as error:
        model_entries(OPTIONS | text)
    assert "\n" not in error.value.message
