"""OpenAI's, vLLM's, Cohere's and Ollama's vectors, classes and ranks over real engines of tiny encoders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from encoder_models import write_encoder, write_tokenizer
from encoder_server import serving
from live_server import LiveServer
from quire import LLM
from quire.core.errors import BadRequest
from quire.ops.native import load_native
from quire.server.apis.openai.embeddings import TASKS

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
TEXTS = ["the cat sat on a mat.", "how many live in berlin?", "a cat"]
LONG = "in berlin live many " * 60
PROMPTS = {"search_query": "query: ", "retrieval.passage": "on : "}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("encoder")
    write_encoder(folder, "bert")
    write_tokenizer(folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    with serving(folder) as server:
        yield server


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, list[list[float]]]]:
    """One of three classes, and transformers' logits of `TEXTS`."""
    folder = tmp_path_factory.mktemp("classifier")
    model = write_encoder(folder, "bert", "ForSequenceClassification", num_labels=3)
    write_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = [model(**theirs(text, return_tensors="pt")).logits[0].double().tolist() for text in TEXTS]
    with serving(folder) as server:
        yield server, logits


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("reranker")
    write_encoder(folder, "bert", "ForSequenceClassification", num_labels=1)
    write_tokenizer(folder)
    with serving(folder) as server:
        yield server


def answered(server: LiveServer, path: str, body: dict[str, Any]) -> Any:
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def vector(server: LiveServer, text: str | list[int], **more: Any) -> list[float]:
    found: list[float] = answered(server, "/v1/embeddings", {"input": text, **more})["data"][0]["embedding"]
    return found


def test_classes_are_those_of_transformers(classifier: tuple[LiveServer, list[list[float]]]) -> None:
    server, logits = classifier
    reply = answered(server, "/v1/classify", {"input": TEXTS})
    assert reply["id"].startswith("classify-") and reply["object"] == "list"
    assert reply["usage"]["prompt_tokens"] == sum(len(server.tokenizer.encode(text)) for text in TEXTS)
    for i, (each, want) in enumerate(zip(reply["data"], logits, strict=True)):
        best = int(np.argmax(want))
        assert (each["index"], each["label"], each["num_classes"]) == (i, f"LABEL_{best}", 3)
        np.testing.assert_allclose(each["probs"], np.exp(want) / np.exp(want).sum(), atol=1e-5)
    raw = answered(server, "/classify", {"input": TEXTS[0], "use_activation": False})["data"][0]["probs"]
    np.testing.assert_allclose(raw, logits[0], atol=1e-5)
    ids = answered(server, "/v1/classify", {"input": server.tokenizer.encode(TEXTS[0])})["data"][0]
    assert ids == reply["data"][0]
    cut = answered(server, "/v1/classify", {"input": LONG, "truncate_prompt_tokens": 20})
    assert cut["usage"]["prompt_tokens"] == 20
    for wrong in ([], LONG, [99_999]):
        refused = server.post("/v1/classify", {"input": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


def test_llm_classifies(classifier: tuple[LiveServer, list[list[float]]], encoder: LiveServer) -> None:
    server, logits = classifier
    with LLM(server.engine.info.folder, device="cpu", num_blocks=512) as llm:
        for found, want in zip(llm.classify(TEXTS, use_tqdm=False), logits, strict=True):
            assert found.outputs.num_classes == 3
            np.testing.assert_allclose(found.outputs.probs, np.exp(want) / np.exp(want).sum(), atol=1e-5)
    with (
        LLM(encoder.engine.info.folder, device="cpu", num_blocks=512) as llm,
        pytest.raises(BadRequest, match="vectors"),
    ):
        llm.classify(TEXTS)


def test_coheres_ranks_have_no_texts_unless_asked(reranker: LiveServer) -> None:
    body = {"query": TEXTS[1], "documents": [TEXTS[0], {"text": TEXTS[2]}]}
    with_texts = answered(reranker, "/v1/rerank", body)["results"]
    assert {each["document"]["text"] for each in with_texts} == {TEXTS[0], TEXTS[2]}
    alone = answered(reranker, "/v2/rerank", body | {"priority": 0})["results"]
    assert alone == [{k: v for k, v in each.items() if k != "document"} for each in with_texts]
    asked = answered(reranker, "/v2/rerank", body | {"return_documents": True, "top_n": 1})["results"]
    assert asked == with_texts[:1]


def test_first_tokens_of_documents(reranker: LiveServer) -> None:
    words = LONG.split()
    for most in (1, 7, 60):
        body = {"query": TEXTS[1], "documents": [LONG], "max_tokens_per_doc": most}
        found = answered(reranker, "/v1/rerank", body)["results"][0]
        same = {"query": TEXTS[1], "documents": [" ".join(words[:most])]}
        assert found["relevance_score"] == answered(reranker, "/v1/rerank", same)["results"][0]["relevance_score"]
        assert found["document"]["text"] == LONG
    assert reranker.post("/v1/rerank", {"query": TEXTS[1], "documents": [LONG]}).status_code == 400


@pytest.mark.parametrize("field", ["input_type", "task"])
def test_names_of_tasks_choose_prompts(encoder: LiveServer, field: str) -> None:
    query, passage = vector(encoder, f"query: {TEXTS[2]}"), vector(encoder, f"on : {TEXTS[2]}")
    for group, want in zip(TASKS, (query, passage), strict=False):
        for name in group:
            assert vector(encoder, TEXTS[2], **{field: name}) == want
    reply = encoder.post("/v1/embeddings", {"input": TEXTS[2], field: "clustering"})
    assert reply.json()["data"][0]["embedding"] == vector(encoder, TEXTS[2])
    assert field in reply.headers["warning"], "the model has no such prompt"
    for more in ({"prompt_name": "search_query"}, {"input_type": "query", "task": "query"}):
        reply = encoder.post("/v1/embeddings", {"input": "a", field: "query", **more})
        assert reply.status_code == 400 and "give one of" in reply.json()["error"]["message"]


def test_truncated_texts_keep_their_special_tokens(encoder: LiveServer) -> None:
    ids = encoder.tokenizer.encode(LONG)
    for keep, most in ((20, 20), (-1, 140)):
        kept = [*ids[: most - 1], ids[-1]]
        assert vector(encoder, LONG, truncate_prompt_tokens=keep) == vector(encoder, kept)
        assert vector(encoder, ids, truncate_prompt_tokens=keep) == vector(encoder, ids[:most])
        bare = encoder.tokenizer.encode(LONG, False)[:most]
        assert vector(encoder, LONG, truncate_prompt_tokens=keep, add_special_tokens=False) == vector(encoder, bare)
    for wrong in (0, -2, 141):
        refused = encoder.post("/v1/embeddings", {"input": LONG, "truncate_prompt_tokens": wrong})
        assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


def test_ollama_truncates_texts_of_encoders(encoder: LiveServer) -> None:
    model = encoder.service.names[0]
    ids = encoder.tokenizer.encode(LONG)
    reply = answered(encoder, "/api/embed", {"model": model, "input": [LONG, TEXTS[0]]})
    assert reply["prompt_eval_count"] == 140 + len(encoder.tokenizer.encode(TEXTS[0]))
    cut = answered(encoder, "/v1/embeddings", {"input": [*ids[:139], ids[-1]], "normalize": True})
    assert reply["embeddings"][0] == cut["data"][0]["embedding"]
    refused = encoder.post("/api/embed", {"model": model, "input": LONG, "truncate": False})
    assert refused.status_code == 400 and refused.json()["error"].startswith("input: has")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/classify", {"input": "a"}, None),
        ("/v1/classify", {}, "input"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ("/v2/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/completions", {"prompt": "a"}, None),
    ],
)
def test_what_is_refused(encoder: LiveServer, path: str, body: dict[str, Any], param: str | None) -> None:
    reply = encoder.post(path, body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param, error
