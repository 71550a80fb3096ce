"""TEI's routes over real engines of tiny encoders: vectors, pairs and classes are those of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import InferenceClient
from transformers import AutoTokenizer, PreTrainedModel

from encoder_models import rows, write_encoder, write_splade, write_tokenizer
from encoder_server import serving
from live_server import LiveServer
from quire.ops.native import load_native
from real_server import real

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
TEXTS = ["the cat sat on a mat.", "how many live in berlin?", "a cat"]
LONG = "in berlin live many " * 60
PROMPTS = {"query": "query: ", "document": ""}
Made = tuple[LiveServer, PreTrainedModel]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("encoder")
    model = write_encoder(folder, "bert")
    write_tokenizer(folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    with serving(folder) as server:
        yield server, model


def classifying(folder: Any, labels: int) -> PreTrainedModel:
    model = write_encoder(folder, "bert", "ForSequenceClassification", num_labels=labels)
    write_tokenizer(folder)
    return model


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("reranker")
    model = classifying(folder, 1)
    with serving(folder) as server:
        yield server, model


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("classifier")
    model = classifying(folder, 3)
    with serving(folder) as server:
        yield server, model


@pytest.fixture(scope="module")
def splade(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("splade")
    model = write_splade(folder, "bert")
    write_tokenizer(folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    with serving(folder) as server:
        yield server, model


def answered(server: LiveServer, path: str, body: dict[str, Any]) -> Any:
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def logits(made: Made, *texts: str) -> np.ndarray[Any, Any]:
    """transformers' logits of a text or of a pair that is cut to what the model reads."""
    server, model = made
    theirs = AutoTokenizer.from_pretrained(server.engine.info.folder)
    with torch.no_grad():
        found = model(**theirs(*texts, return_tensors="pt", truncation=True, max_length=140)).logits[0]
    return np.asarray(found.numpy(), np.float64)


def test_embed_is_the_mean_of_transformers_rows(encoder: Made) -> None:
    server, model = encoder
    ids = [server.tokenizer.encode(text) for text in TEXTS]
    want = [rows(model, each).mean(0).numpy() for each in ids]
    raw = answered(server, "/embed", {"inputs": TEXTS, "normalize": False})
    np.testing.assert_allclose(raw, want, atol=1e-5)
    whole = answered(server, "/embed", {"inputs": TEXTS})
    np.testing.assert_allclose(whole, [row / np.linalg.norm(row) for row in want], atol=1e-5)
    assert answered(server, "/embed", {"inputs": TEXTS[0]}) == answered(server, "/embed", {"inputs": ids[0]})
    assert answered(server, "/embed", {"inputs": ids}) == whole
    nothing = answered(server, "/embed", {"inputs": ""})
    assert nothing == answered(server, "/embed", {"inputs": server.tokenizer.encode("")}), "special tokens alone"
    head = np.array(whole)[:, :8]
    cut = answered(server, "/embed", {"inputs": TEXTS, "dimensions": 8})
    np.testing.assert_allclose(cut, head / np.linalg.norm(head, axis=1, keepdims=True), atol=1e-6)


def weights(made: Made, text: str) -> np.ndarray[Any, Any]:
    """SPLADE's weights of transformers' logits (Formal et al. 2021)."""
    server, model = made
    with torch.no_grad():
        logits = model(torch.tensor([server.tokenizer.encode(text)])).logits[0]
    return np.asarray(logits.relu().log1p().amax(0).numpy())


def test_embed_sparse_has_splades_weights(splade: Made) -> None:
    server, _ = splade
    found = answered(server, "/embed_sparse", {"inputs": TEXTS})
    for text, each in zip(TEXTS, found, strict=True):
        want = weights(splade, text)
        assert each[0].keys() == {"index", "value"}
        indices = [one["index"] for one in each]
        assert indices == sorted(set(indices)) and all(one["value"] > 0 for one in each)
        made = np.zeros(len(want))
        made[indices] = [one["value"] for one in each]
        np.testing.assert_allclose(made, want, atol=1e-5)
    for text, each in zip(TEXTS, found, strict=True):
        assert answered(server, "/embed_sparse", {"inputs": text}) == [each], "the same bits alone"
        ids = server.tokenizer.encode(text)
        assert answered(server, "/embed_sparse", {"inputs": ids}) == [each]
    named = answered(server, "/embed_sparse", {"inputs": TEXTS[2], "prompt_name": "query"})
    assert named == answered(server, "/embed_sparse", {"inputs": f"query: {TEXTS[2]}"}) != found[2:]
    ids = server.tokenizer.encode(LONG)
    for side, kept in (("Right", ids[1:139]), ("Left", ids[-139:-1])):
        cut = answered(server, "/embed_sparse", {"inputs": LONG, "truncate": True, "truncation_direction": side})
        assert cut == answered(server, "/embed_sparse", {"inputs": [ids[0], *kept, ids[-1]]})


def test_embed_of_splade_has_a_number_for_each_token_of_the_vocabulary(splade: Made) -> None:
    """As TEI gives it where nothing is to be divided by the length."""
    server, _ = splade
    found = answered(server, "/embed", {"inputs": TEXTS, "normalize": False})
    np.testing.assert_allclose(found, [weights(splade, text) for text in TEXTS], atol=1e-5)


def test_embed_puts_the_prompt_of_a_task_before_texts(encoder: Made) -> None:
    server, _ = encoder
    plain = answered(server, "/embed", {"inputs": f"query: {TEXTS[2]}"})
    assert answered(server, "/embed", {"inputs": TEXTS[2], "prompt_name": "query"}) == plain
    assert answered(server, "/embed", {"inputs": TEXTS[2], "prompt_name": "document"}) != plain


def test_embed_truncates_either_side(encoder: Made) -> None:
    server, _ = encoder
    ids = server.tokenizer.encode(LONG)
    inner = ids[1:-1]
    for side, kept in (("Right", inner[:138]), ("Left", inner[-138:])):
        body = {"inputs": LONG, "truncate": True, "truncation_direction": side}
        found = answered(server, "/embed", body)
        assert found == answered(server, "/embed", {"inputs": [ids[0], *kept, ids[-1]]})
    assert answered(server, "/embed", {"inputs": LONG, "truncate": True}) == answered(
        server, "/embed", {"inputs": LONG, "truncate": True, "truncation_direction": "right"}
    )


def test_embed_all_has_a_row_for_each_token(encoder: Made) -> None:
    server, model = encoder
    found = answered(server, "/embed_all", {"inputs": TEXTS})
    for text, each in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(each, rows(model, server.tokenizer.encode(text)).numpy(), atol=1e-5)


def test_embed_all_of_a_decoder_is_the_same_behind_a_prefix() -> None:
    """Tokens that the prefix cache has are read again, for their rows."""
    with real(num_blocks=64, max_num_batched_tokens=32, block_size=4, max_num_seqs=8) as server:
        text = "def add(a, b):\n    return a + b\n" * 8
        one = answered(server, "/embed_all", {"inputs": text})
        assert answered(server, "/embed_all", {"inputs": text}) == one
        assert len(one[0]) == len(server.tokenizer.encode(text)) > 64
        last = answered(server, "/embed", {"inputs": text, "normalize": False})
        assert one[0][-1] == last[0]


def test_similarity_is_the_cosine(encoder: Made) -> None:
    server, _ = encoder
    vectors = np.array(answered(server, "/embed", {"inputs": TEXTS}))
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}}
    assert answered(server, "/similarity", body) == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-6)
    asked = answered(server, "/similarity", body | {"parameters": {"prompt_name": "query"}})
    named = np.array(answered(server, "/embed", {"inputs": TEXTS, "prompt_name": "query"}))
    assert asked == pytest.approx((named[1:] @ named[0]).tolist(), abs=1e-6)


@pytest.mark.parametrize("raw", [False, True])
def test_rerank_is_transformers_logit_of_a_pair(reranker: Made, raw: bool) -> None:
    server, _ = reranker
    texts = [*TEXTS, LONG]
    body = {"query": TEXTS[1], "texts": texts, "raw_scores": raw, "truncate": True}
    found = answered(server, "/rerank", body)
    want = [float(logits(reranker, TEXTS[1], text)[0]) for text in texts]
    want = want if raw else [1 / (1 + np.exp(-each)) for each in want]
    assert [each["index"] for each in found] == sorted(range(len(texts)), key=lambda i: -want[i])
    assert {each["index"]: each["score"] for each in found} == pytest.approx(dict(enumerate(want)), abs=1e-5)
    assert all("text" not in each for each in found)
    shown = answered(server, "/rerank", body | {"return_text": True})
    assert [each["text"] for each in shown] == [texts[each["index"]] for each in found]


def test_rerank_has_the_other_body_on_the_same_path(reranker: Made) -> None:
    server, _ = reranker
    ours = answered(server, "/rerank", {"query": TEXTS[1], "texts": TEXTS})
    other = answered(server, "/rerank", {"query": TEXTS[1], "documents": TEXTS})["results"]
    assert [(each["index"], each["score"]) for each in ours] == [(e["index"], e["relevance_score"]) for e in other]


def test_predict_has_classes_of_texts_and_pairs(classifier: Made) -> None:
    server, _ = classifier

    def want(*texts: str) -> dict[str, float]:
        found = logits(classifier, *texts)
        return {f"LABEL_{i}": each for i, each in enumerate(np.exp(found) / np.exp(found).sum())}

    for inputs, texts in ((TEXTS[0], TEXTS[:1]), ([TEXTS[0]], TEXTS[:1]), (TEXTS[:2], TEXTS[:2])):
        found = answered(server, "/predict", {"inputs": inputs})
        assert {each["label"]: each["score"] for each in found} == pytest.approx(want(*texts), abs=1e-5)
        assert [each["score"] for each in found] == sorted((e["score"] for e in found), reverse=True)
    several = answered(server, "/predict", {"inputs": [[TEXTS[0]], TEXTS[:2], [LONG]], "truncate": True})
    for each, texts in zip(several, (TEXTS[:1], TEXTS[:2], [LONG]), strict=True):
        assert {one["label"]: one["score"] for one in each} == pytest.approx(want(*texts), abs=1e-5)
    raw = answered(server, "/predict", {"inputs": TEXTS[0], "raw_scores": True})
    named = {f"LABEL_{i}": each for i, each in enumerate(logits(classifier, TEXTS[0]).tolist())}
    assert {each["label"]: each["score"] for each in raw} == pytest.approx(named, abs=1e-5)


def test_info_says_what_the_model_is(encoder: Made, reranker: Made, classifier: Made, splade: Made) -> None:
    kinds = []
    for server, _ in (encoder, reranker, classifier, splade):
        info = server.http.get("/info").json()
        assert (info["max_input_length"], info["auto_truncate"]) == (140, False)
        kinds.append(info["model_type"])
    assert kinds[0] == {"embedding": {"pooling": "mean"}}
    assert kinds[1] == {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}
    assert kinds[2]["classifier"]["label2id"] == {f"LABEL_{i}": i for i in range(3)}
    assert kinds[3] == {"embedding": {"pooling": "splade"}}


def test_hugging_faces_client(encoder: Made) -> None:
    """Its feature extraction posts to the root of an address, so that it is given the route."""
    server, _ = encoder
    client = InferenceClient(model=f"{server.url}/embed", token="none")
    assert np.array_equal(
        client.feature_extraction(TEXTS[0]), np.array(answered(server, "/embed", {"inputs": TEXTS[0]}), np.float32)
    )


WRONG = [
    ("encoder", "/embed", {"inputs": []}, "inputs"),
    ("encoder", "/embed", {"inputs": [99_999]}, "inputs"),
    ("encoder", "/embed", {"inputs": ["a", [5]]}, "inputs"),
    ("encoder", "/embed", {"inputs": 7}, "inputs"),
    ("encoder", "/embed", {}, "inputs"),
    ("encoder", "/embed", {"inputs": LONG}, "inputs"),
    ("encoder", "/embed", {"inputs": "a", "dimensions": 0}, "dimensions"),
    ("encoder", "/embed", {"inputs": "a", "prompt_name": "other"}, "prompt_name"),
    ("encoder", "/embed", {"inputs": "a", "truncate": True, "truncation_direction": "Up"}, "truncation_direction"),
    ("encoder", "/embed", {"inputs": ["a"] * 9000}, "inputs"),
    ("encoder", "/embed_all", {"inputs": ["a b c " * 40] * 600}, "inputs"),
    ("encoder", "/predict", {"inputs": "a"}, "this model has no classes"),
    ("encoder", "/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences"),
    ("encoder", "/similarity", {"inputs": {"sentences": ["a"]}}, "inputs.source_sentence"),
    ("encoder", "/rerank", {"query": "a", "texts": []}, "texts"),
    ("encoder", "/rerank", {"query": "a", "texts": [5]}, "texts[0]"),
    ("encoder", "/embed_sparse", {"inputs": "a"}, "this model is not an embedding model with SPLADE pooling"),
    ("reranker", "/embed_sparse", {"inputs": "a"}, "this model is not an embedding model with SPLADE pooling"),
    ("splade", "/embed_sparse", {"inputs": []}, "inputs"),
    ("splade", "/embed_sparse", {"inputs": [99_999]}, "inputs"),
    ("splade", "/embed_sparse", {"inputs": LONG}, "inputs"),
    ("splade", "/embed_sparse", {"inputs": "a", "prompt_name": "other"}, "prompt_name"),
    ("splade", "/embed", {"inputs": "a"}, "normalize: is not available for SPLADE models"),
    ("splade", "/embed", {"inputs": "a", "normalize": False, "dimensions": 8}, "dimensions: is not available"),
    ("splade", "/embed_all", {"inputs": "a"}, "this model makes sparse vectors"),
    ("splade", "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["a"]}}, "this model makes sparse"),
    ("splade", "/rerank", {"query": "a", "texts": ["b"]}, "this model makes sparse vectors"),
    ("splade", "/predict", {"inputs": "a"}, "this model has no classes"),
    ("reranker", "/embed", {"inputs": "a"}, "this model classifies"),
    ("reranker", "/embed_all", {"inputs": "a"}, "this model classifies"),
    ("reranker", "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["a"]}}, "this model classifies"),
    ("reranker", "/rerank", {"query": "a", "texts": [LONG]}, "texts"),
    ("classifier", "/rerank", {"query": "a", "texts": ["b"]}, "this model tells 3 classes apart"),
    ("classifier", "/predict", {"inputs": []}, "inputs"),
    ("classifier", "/predict", {"inputs": ["a", "b", "c"]}, "inputs"),
    ("classifier", "/predict", {"inputs": [["a"], []]}, "inputs[1]"),
    ("classifier", "/predict", {"inputs": [["a"], "b"]}, "inputs[1]"),
    ("classifier", "/predict", {"inputs": ["a", ["b"]]}, "inputs"),
    ("classifier", "/predict", {"inputs": LONG}, "inputs"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "path", "body", "named"), WRONG, ids=[f"{i}{row[1]}" for i, row in enumerate(WRONG)])
def test_what_is_refused(
    request: pytest.FixtureRequest, kind: str, path: str, body: dict[str, Any], named: str
) -> None:
    """Wrong bodies of TEI's are answered in TEI's shape."""
    server, _ = request.getfixturevalue(kind)
    reply = server.post(path, body)
    assert reply.status_code == 400, reply.text
    assert reply.json().keys() == {"error", "error_type"} and reply.json()["error_type"] == "validation"
    assert reply.json()["error"].startswith(named), reply.text
