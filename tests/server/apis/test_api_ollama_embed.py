"""Ollama's vectors over a real engine, by Ollama's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from live_server import LiveServer
from quire.server.apis.openai.prompts import encode_shortened
from real_server import real

ollama = pytest.importorskip("ollama", reason="the extra 'clients' is not installed")
TEXTS = ["def add(a, b):", "a list of numbers"]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with real(num_blocks=64, max_model_len=32) as made:
        yield made


@pytest.fixture
def client(server: LiveServer) -> Iterator[Any]:
    with ollama.Client(host=server.url, timeout=30.0) as made:
        yield made


def test_vectors_are_those_of_openais_route(server: LiveServer, client: Any) -> None:
    name = server.service.names[0]
    reply = client.embed(model=f"{name}:latest", input=TEXTS)
    plain = server.http.post("/v1/embeddings", json={"input": TEXTS}).json()
    assert np.array_equal(reply.embeddings, [each["embedding"] for each in plain["data"]])
    assert (reply.model, reply.load_duration) == (f"{name}:latest", 0) and reply.total_duration > 0
    assert reply.prompt_eval_count == plain["usage"]["prompt_tokens"]
    assert client.embed(model=name, input=TEXTS[0]).embeddings == reply.embeddings[:1]
    assert client.embeddings(model=name, prompt=TEXTS[0]).embedding == reply.embeddings[0]
    head = np.array(reply.embeddings)[:, :8]
    cut = client.embed(model=name, input=TEXTS, dimensions=8).embeddings
    assert np.allclose(cut, head / np.linalg.norm(head, axis=1, keepdims=True), atol=1e-6)
    assert client.embed(model=name, input=TEXTS[0], dimensions=0).embeddings == reply.embeddings[:1]
    assert "embedding" in client.show(name).capabilities


def test_nothing_has_no_vector(server: LiveServer, client: Any) -> None:
    name = server.service.names[0]
    assert client.embed(model=name, input="").embeddings == client.embed(model=name, input=[]).embeddings == []
    assert client.embeddings(model=name, prompt="").embedding == []


def test_the_beginning_of_a_long_text(server: LiveServer, client: Any) -> None:
    name, long = server.service.names[0], "number " * 60
    reply = client.embed(model=name, input=[long, TEXTS[0]])
    ids = server.tokenizer.encode(long)
    assert len(ids) > 32 and reply.prompt_eval_count == 32 + len(server.tokenizer.encode(TEXTS[0]))
    first = server.http.post("/v1/embeddings", json={"input": ids[:32]}).json()["data"][0]["embedding"]
    assert np.array_equal(reply.embeddings[0], first)
    for ask, field in ((client.embed, "input"), (client.embeddings, "prompt")):
        more = {"truncate": False} if field == "input" else {}
        with pytest.raises(ollama.ResponseError, match=f"^{field}: ") as refused:
            ask(model=name, **{field: long}, **more)
        assert refused.value.status_code == 400


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_special_tokens_stay(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = server.tokenizer.encode
    monkeypatch.setattr(
        server.tokenizer, "encode", lambda text, special=True: [1, *encode(text), 2] if special else encode(text)
    )
    long = "number " * 60
    assert await encode_shortened(server.service, [long, "a"], 32) == [[1, *encode(long)[:30], 2], [1, *encode("a"), 2]]


def test_what_is_ignored_is_named(server: LiveServer) -> None:
    body = {"model": server.service.names[0], "input": "a", "keep_alive": "5m", "options": {"num_ctx": 5}}
    told = server.post("/api/embed", body).headers["warning"]
    assert "keep_alive" in told and "options" in told


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"model": "other"}, "model"), ({"input": [5]}, "input"), ({"input": 5}, "input"),
     ({"dimensions": -1}, "dimensions"), ({"dimensions": 100_000}, "dimensions")],
    ids=str,
)  # fmt: skip
def test_what_is_refused(server: LiveServer, fields: dict[str, Any], named: str) -> None:
    reply = server.post("/api/embed", {"model": server.service.names[0], "input": "a", **fields})
    assert reply.status_code == (404 if named == "model" else 400), reply.text
    assert reply.json()["error"].startswith(named)
