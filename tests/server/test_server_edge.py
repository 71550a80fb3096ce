"""Small things that clients meet: fields nobody knows, pings of silent streams, an emptied cache, openapi.json."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live_server import LiveServer, live, open_stream, read_all, wait_until
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine_options import engine_config
from quire.engine.local import LocalEngine
from quire.server.http.body import ignored_warning
from quire.server.routes import TABLE
from quire.server.server_options import ServerOptions
from stub_engine import StubEngine
from tiny_model import OPTIONS, write_tiny

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live() as server:
        yield server


UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a", "temprature": 1}, "temprature"),
    ("/v1/completions", {"prompt": "a", "stream": True, "stream_options": {"all": 1}}, "stream_options.all"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x"),
    ("/tokenize", {"messages": HI, "colour": 1}, "colour"),
    ("/tokenize", {"prompt": "a", "colour": 1}, "colour"),
    ("/detokenize", {"tokens": [5], "colour": 1}, "colour"),
]


@pytest.mark.parametrize(("path", "body", "name"), UNKNOWN)
def test_unknown_fields_are_named_in_a_header_and_strict_refuses_them(
    server: LiveServer, path: str, body: dict[str, Any], name: str
) -> None:
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["warning"] == f'299 quire "ignored, without effect here: {name}"'
    assert "warning" not in server.post("/tokenize", {"prompt": "a"}).headers
    wrong = server.post("/v1/completions", {"prompt": 5, "colour": 1})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "prompt"
    with live(strict=True) as strict:
        refused = strict.post(path, body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name


def test_no_name_can_break_the_header() -> None:
    value = ignored_warning(['a"\\', "b\r\nset-cookie: c", "é😀", *map(str, range(20)), "x" * 500])
    assert value.isascii() and all(32 <= byte < 127 for byte in value) and len(value) < 2000
    assert value.endswith(b'and 14 more"') and b'a\\"' in value


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_silent_stream_has_headers_and_pings(path: str) -> None:
    stub = StubEngine()
    stub.paused = True
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": HI}
    with live(stub, stream_ping_interval=0.1) as server:
        with server.http.stream("POST", path, json=body | {"max_tokens": 3, "stream": True}) as reply:
            assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
            lines = reply.iter_lines()
            assert [next(lines) for _ in range(4)] == [": ping", ""] * 2
            stub.paused = False
            assert [line for line in lines if line][-1] == "data: [DONE]"
        with server.openai() as client:
            stub.step_seconds = 0.25
            parts = list(client.completions.create(model="stub", prompt="a", max_tokens=3, seed=1, stream=True))
        assert len(parts) == 3, "pings between tokens are no events; each of this seed's tokens has text"
        stub.poison, stub.step_seconds = 0, 0.3
        text = server.post(path, body | {"stream": True}).text
        assert text.startswith(": ping\n\n") and "event: error" in text and "[DONE]" not in text


def test_pings_can_be_off_and_an_early_failure_keeps_its_status() -> None:
    stub = StubEngine(step_seconds=0.15)
    with live(stub, stream_ping_interval=0) as server:
        stream = open_stream(server, {"prompt": "a", "max_tokens": 2})
        assert "ping" not in read_all(stream)
        stub.poison = 0
        assert server.post("/v1/completions", {"prompt": "a", "stream": True}).status_code == 500
    with pytest.raises(ConfigError, match=r"--stream-ping-interval -1\.0 must not be negative"):
        ServerOptions(stream_ping_interval=-1.0).validate()


def test_a_client_that_left_while_it_waited_is_noticed() -> None:
    stub = StubEngine()
    stub.paused = True
    with live(stub, stream_ping_interval=0.05) as server:
        sock = open_stream(server)
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        sock.close()
        wait_until(lambda: server.engine.in_flight == 0 and len(stub.aborted) == 1)


def test_the_prefix_cache_is_emptied_where_that_is_allowed(server: LiveServer) -> None:
    refused = server.http.post("/reset_prefix_cache")
    assert refused.status_code == 403 and "--allow-reset-prefix-cache" in refused.json()["error"]["message"]
    with live(allow_reset_prefix_cache=True, api_key=("k",)) as allowed:
        assert allowed.http.post("/reset_prefix_cache").status_code == 401 and not allowed.stub.resets
        allowed.http.headers["authorization"] = "Bearer k"
        reply = allowed.http.post("/reset_prefix_cache")
        assert reply.status_code == 200 and reply.content == b"" and allowed.stub.resets == 1
        asked = allowed.http.post("/reset_prefix_cache?reset_running_requests=true")
        assert asked.status_code == 400 and asked.json()["error"]["param"] == "reset_running_requests"
        assert allowed.http.get("/reset_prefix_cache").status_code == 405


def test_an_emptied_cache_is_cold_and_what_runs_goes_on(tmp_path: Path) -> None:
    engine = LocalEngine(engine_config({"model": write_tiny(tmp_path / "tiny"), **OPTIONS}))

    def run(name: str, reset: bool = False) -> tuple[list[int], int]:
        made, cached = list[int](), 0
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        engine.submit(Request(id=name, prompt=tuple(range(8, 56)), params=params, seed=1, arrival=time.monotonic()))
        for step in range(200):
            report = engine.poll(0.0)
            if report is None:
                break
            for output in report.outputs:
                made += output.tokens
                cached = max(cached, output.cached_tokens)
            if reset and step == 12:
                engine.reset_prefix_cache()
                engine.engine.pool.check()
                assert engine.engine.pool.num_cached == 0
        engine.engine.check()
        return made, cached

    first, cold = run("a")
    again, warm = run("b")
    assert first == again and cold == 0 and warm >= 32 and len(first) == 24
    engine.reset_prefix_cache()
    assert run("c", reset=True) == (first, 0), "cold, and emptied while it ran"
    assert run("d")[0] == first
    engine.close()


def test_openapi_documents_parameters_and_every_reply(server: LiveServer) -> None:
    found = server.http.get("/openapi.json").json()
    get = found["paths"]["/v1/models/{model}"]["get"]
    assert [(p["name"], p["in"], p["required"]) for p in get["parameters"]] == [("model", "path", True)]
    for path, operations in found["paths"].items():
        for operation in operations.values():
            replies = operation["responses"]
            assert {"200", "400", "401", "421", "431", "500"} <= set(replies), path
            assert replies["400"]["content"]["application/json"]["schema"] == {
                "$ref": f"#/components/schemas/{TABLE.dialect(path).shape.__name__}"
            }
            assert ("requestBody" in operation) == ("413" in replies)
    chat = found["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(chat) == {"200", *map(str, (400, 401, 404, 408, 413, 415, 421, 429, 431, 500, 503))}
    assert set(chat["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "additionalProperties" not in found["components"]["schemas"]["CompletionRequest"]
    with live(strict=True) as strict:
        schemas = strict.http.get("/openapi.json").json()["components"]["schemas"]
        assert schemas["CompletionRequest"]["additionalProperties"] is False


def test_allow_names_every_method(server: LiveServer) -> None:
    assert server.http.delete("/ping").headers["allow"] == "GET, HEAD, POST"
    assert server.http.put("/v1/models/stub").headers["allow"] == "GET, HEAD"
    assert server.http.get("/tokenize").headers["allow"] == "POST"
