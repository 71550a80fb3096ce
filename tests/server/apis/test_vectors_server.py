"""/v1/embeddings, /v1/score and /v1/rerank over a real engine, by OpenAI's client and plain HTTP."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import pytest

from live_server import LiveServer
from real_server import real

TEXTS = ["def add(a, b):", "a list of numbers", "the sum of two numbers"]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with real(num_blocks=64) as made:
        yield made


def test_openai_client_gets_vectors(server: LiveServer) -> None:
    """Its client asks for base64 by itself."""
    client = server.openai()
    reply = client.embeddings.create(model=server.service.names[0], input=TEXTS)
    rows = np.array([each.embedding for each in reply.data])
    plain = client.embeddings.create(model=server.service.names[0], input=TEXTS, encoding_format="float")
    assert [each.index for each in reply.data] == [0, 1, 2]
    assert np.allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-5)
    assert np.array_equal(rows.astype(np.float32), np.array([e.embedding for e in plain.data], np.float32))
    ids = [server.tokenizer.encode(text) for text in TEXTS]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, ids))
    tokens = client.embeddings.create(model=server.service.names[0], input=ids)
    assert [e.embedding for e in tokens.data] == [e.embedding for e in reply.data]
    cut = client.embeddings.create(model=server.service.names[0], input=TEXTS[0], dimensions=8)
    head = rows[0][:8] / np.linalg.norm(rows[0][:8])
    assert np.allclose(cut.data[0].embedding, head, atol=1e-5)


def test_base64_is_little_endian_f32(server: LiveServer) -> None:
    body = {"input": TEXTS[0]}
    plain = server.http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    coded = server.http.post("/v1/embeddings", json=body | {"encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(coded), "<f4"), np.array(plain, np.float32))


def test_scores_and_ranks_are_cosines(server: LiveServer) -> None:
    found = server.http.post("/v1/embeddings", json={"input": TEXTS}).json()["data"]
    rows = np.array([each["embedding"] for each in found])
    want = [float(rows[0] @ rows[1]), float(rows[0] @ rows[2])]
    reply = server.http.post("/v1/score", json={"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
    assert [each["score"] for each in reply["data"]] == pytest.approx(want, abs=1e-5)
    body = {"query": TEXTS[0], "documents": TEXTS[1:]}
    ranked = server.http.post("/v1/rerank", json=body).json()["results"]
    order = sorted((0, 1), key=lambda i: -want[i])
    assert [each["index"] for each in ranked] == order
    assert [each["document"]["text"] for each in ranked] == [TEXTS[1:][i] for i in order]
    best = server.http.post("/rerank", json=body | {"top_n": 1, "return_documents": False}).json()["results"]
    assert best == [{"index": order[0], "relevance_score": pytest.approx(want[order[0]], abs=1e-5)}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [99_999_999]}, "input"),
        ("/v1/embeddings", {"input": ["a", [1]]}, "input"),
        ("/v1/embeddings", {"input": [1] * 100_000}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "priority": 1}, "priority"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ],
)
def test_bad_fields_are_named(server: LiveServer, path: str, body: dict[str, object], param: str) -> None:
    reply = server.http.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
