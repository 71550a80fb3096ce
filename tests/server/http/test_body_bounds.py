"""What is in a body is counted before any other work, in every API, and nothing of it holds the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from live_server import LiveServer, live
from paths import DOCS
from quire.core.errors import BadRequest
from quire.server.routes import TABLE
from stub_engine import StubEngine, stub_info

MAX_VALUES, MAX_GROUPS, MAX_NAMES = 524_288, 65_536, 32_768
SAID = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CHATS = {
    "/v1/chat/completions": {},
    "/v1/messages": {"model": "stub", "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "stub"},
    "/api/chat": {"model": "stub"},
    "/tokenize": {},
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live(StubEngine(stub_info(max_model_len=4096))) as server:
        yield server


def refused(server: LiveServer, path: str, body: dict[str, Any], *told: str) -> None:
    """A 400 whose message has all of `told`."""
    reply = server.post(path, body, timeout=60)
    assert reply.status_code == 400, reply.text[:300]
    assert all(word in reply.text for word in told), (told, reply.text[:300])


@pytest.mark.parametrize("path", CHATS)
def test_messages_parts_and_tools_are_counted(server: LiveServer, path: str) -> None:
    own = CHATS[path]
    refused(server, path, own | {"messages": [SAID] * 8193}, "messages", "8193", "8192")
    refused(server, path, own | {"messages": [SAID], "tools": [TOOL] * 129}, "tools", "129", "128")
    deep = TOOL | {"x": [[0] * 40_000]}
    refused(server, path, own | {"messages": [SAID], "tools": [deep]}, "tools", "4000", "32768")
    if path != "/api/chat":
        parts = [{"type": "text", "text": "a"}] * 1025
        body = own | {"messages": [SAID, SAID | {"content": parts}]}
        refused(server, path, body, "messages[1].content", "1025", "1024")


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/responses", {"input": [SAID] * 8193}, ("input", "8193", "8192")),
        ("/v1/responses", {"input": [SAID | {"content": [{}] * 1025}]}, ("input[0].content", "1025", "1024")),
        ("/v1/responses", {"input": "a", "metadata": {str(i): "a" for i in range(65)}}, ("metadata", "65", "64")),
        ("/v1/completions", {"prompt": ["a"] * 8193}, ("prompt", "8193", "8192")),
        ("/v1/completions", {"prompt": [[5]] * 8193}, ("prompt", "8193", "8192")),
        ("/v1/completions", {"prompt": "a", "stop": ["a"] * 65}, ("stop", "65", "64")),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, ("logit_bias", "1025")),
        ("/v1/completions", {"prompt": "a", "bad_words": ["a"] * 1025}, ("bad_words", "1025", "1024")),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [5] * 1025}, ("stop_token_ids", "1025", "1024")),
        ("/v1/completions", {"prompt": "a", "user": [0] * 4097}, ("user", "4097", "4096")),
        ("/v1/completions", {"prompt": "a", "unheard_of": [[0] * 2048] * 2}, ("unheard_of", "4098", "4096")),
        ("/v1/completions", {"prompt": "a", "guided_choice": ["a"] * 4097}, ("guided_choice", "4097", "4096")),
        ("/v1/completions", {"prompt": "a", "guided_json": {"enum": [0] * 32_768}}, ("guided_json", "32769")),
        ("/v1/completions", {"prompt": "a"} | {f"f{i}": 1 for i in range(512)}, ("513", "512")),
        ("/v1/messages", {"model": "stub", "max_tokens": 1, "messages": [SAID], "stop_sequences": ["a"] * 65}, ("65",)),
        ("/api/generate", {"model": "stub", "prompt": "a", "options": {"stop": ["a"] * 65}}, ("options.stop", "65")),
        ("/api/generate", {"model": "stub", "prompt": "a", "images": [""] * 1025}, ("images", "1025", "1024")),
        ("/generate", {"inputs": "a", "parameters": {"stop": ["a"] * 65}}, ("parameters.stop", "65", "64")),
        ("/completion", {"prompt": "a", "logit_bias": [[5, 1]] * 1025}, ("logit_bias", "1025", "1024")),
        ("/v1/embeddings", {"input": ["a"] * 8193}, ("input", "8193", "8192")),
        ("/v1/score", {"text_1": "a", "text_2": ["a"] * 8193}, ("text_2", "8193", "8192")),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 8193}, ("documents", "8193", "8192")),
        ("/api/embed", {"model": "stub", "input": ["a"] * 8193}, ("input", "8193", "8192")),
        ("/detokenize", {"tokens": [5] * (MAX_VALUES + 1)}, (str(MAX_VALUES),)),
        ("/v1/completions", {"prompt": [5] * (MAX_VALUES + 1)}, (str(MAX_VALUES),)),
        ("/v1/completions", {"prompt": "a", "user": [[]] * MAX_GROUPS}, (str(MAX_GROUPS),)),
        ("/v1/completions", {"prompt": "a", "user": {str(i): 1 for i in range(MAX_NAMES + 1)}}, (str(MAX_NAMES),)),
    ],
)  # fmt: skip
def test_everything_else_is_counted(server: LiveServer, path: str, body: dict[str, Any], told: tuple[str, ...]) -> None:
    refused(server, path, body, *told)


def test_every_field_that_holds_many_is_in_the_table() -> None:
    """A new field of any body is bounded by the table, or by what is said of all the rest."""
    from quire.server.http.bounds import BOUNDS, PROMPTS, REST, check_counts

    lists = {"messages", "prompt", "input", "tools", "stop", "documents", "images", "logit_bias", "tokens", "metadata"}
    fields = {name for route in TABLE.routes for kind in route.body for name in kind.__struct_fields__}
    assert lists <= set(BOUNDS) and set(BOUNDS) <= fields, set(BOUNDS) - fields
    for name in fields:
        bound = BOUNDS.get(name, REST)
        most = PROMPTS.items if name in ("prompt", "input") else bound.items or bound.values or MAX_VALUES
        if most < MAX_VALUES:
            with pytest.raises(BadRequest, match=f"^{name}: "):
                check_counts({name: ["a"] * (most + 1)}, 1 << 23)
        check_counts({name: ["a"] * min(most, 100)}, 1 << 23)


def test_counts_are_refused_before_kinds(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(server, "/v1/chat/completions", {"messages": [5] * 8193, "x": 1}, "messages: 8193 are more than 8192")


def test_a_body_within_the_bounds_is_taken(server: LiveServer) -> None:
    body = {"messages": [SAID] * 300, "tools": [TOOL], "stop": ["zz"] * 64, "max_tokens": 1}
    assert server.post("/v1/chat/completions", body).status_code in (200, 400)
    assert server.post("/v1/completions", {"prompt": ["a"] * 100, "max_tokens": 1}).status_code == 200
    ids = [5 + i % 90 for i in range(4000)]
    assert server.post("/detokenize", {"tokens": ids * 30}).status_code == 200
    assert server.post("/v1/completions", {"prompt": ids, "max_tokens": 1}).status_code == 200


def test_what_an_error_shows_of_a_body_is_short(server: LiveServer) -> None:
    for kind in (["[[1]]"] * 3000, {"a": [1] * 3000}, "b" * 100_000):
        body = {"messages": [SAID | {"content": [{"type": kind}]}]}
        for path in ("/v1/chat/completions", "/v1/messages"):
            reply = server.post(path, CHATS[path] | body)
            assert reply.status_code == 400 and len(reply.content) < 500
    reply = server.post("/v1/completions", {"prompt": "a", "quire": {"x" * 1_000_000: 1}, "n": "y" * 1_000_000})
    assert reply.status_code == 400 and len(reply.content) < 2000


@contextmanager
def watched(server: LiveServer) -> Iterator[list[float]]:
    """The processor seconds that each turn of the server's event loop takes meanwhile."""
    loop, found, on = server.service.engine._loop, [0.0], True
    last = 0.0

    def tick() -> None:
        nonlocal last
        now = time.thread_time()
        found.append(now - last if last else 0.0)
        last = now
        if on:
            loop.call_later(0.001, tick)

    assert isinstance(loop, asyncio.AbstractEventLoop)
    loop.call_soon_threadsafe(tick)
    yield found
    on = False


MANY = json.dumps(SAID)
WORST = {
    "/v1/chat/completions": f'{{"messages":[{",".join([MANY] * 100_000)}]}}',
    "/v1/messages/count_tokens": f'{{"model":"stub","messages":[{",".join([MANY] * 100_000)}]}}',
    "/v1/responses": f'{{"input":[{",".join([MANY] * 100_000)}]}}',
    "/v1/completions": f'{{"prompt":[{",".join(["99"] * 500_000)}]}}',
}


@pytest.mark.parametrize("path", WORST)
def test_the_loop_goes_on(server: LiveServer, path: str) -> None:
    """Figures are benchmarks/serving/event_loop.py's, whose bar is 20 ms; it stood 2 s and more before."""
    server.http.get("/livez")
    with watched(server) as turns:
        reply = server.http.post(path, content=WORST[path].encode(), headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert max(turns) < 0.3


def test_the_table_in_the_documents_is_the_code() -> None:
    from quire.server.http import parsing
    from quire.server.http.bounds import BOUNDS, PROMPTS

    assert (parsing.MAX_VALUES, parsing.MAX_GROUPS, parsing.MAX_NAMES) == (MAX_VALUES, MAX_GROUPS, MAX_NAMES)
    text = (DOCS / "operate" / "security.md").read_text()
    for name in ("messages", "tools", "stop", "logit_bias", "images", "documents", "metadata", "bad_words"):
        [line] = [line for line in text.splitlines() if line.startswith("|") and f"`{name}`" in line]
        assert f"{BOUNDS[name].items:,}" in line, line
    for number in (MAX_VALUES, MAX_GROUPS, MAX_NAMES, PROMPTS.items, parsing.MAX_DEPTH):
        assert f"{number:,}" in text, number
