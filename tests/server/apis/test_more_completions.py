"""`best_of`, beam search over HTTP, and filling in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import quire
from live_server import LiveServer
from quire.text.infill import FORMATS, ends_of, format_of, infill
from quire.text.tokenizer import Tokenizer
from real_server import real

PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with real(num_blocks=256) as made:
        yield made


def test_the_best_are_sent(server: LiveServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 1.3, "seed": 9, "logprobs": 0}
    every = server.http.post("/v1/completions", json=body | {"n": 6}).json()["choices"]
    means = [sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["token_logprobs"]) for c in every]
    order = sorted(range(6), key=lambda i: -means[i])
    best = server.http.post("/v1/completions", json=body | {"n": 2, "best_of": 6}).json()
    assert [c["text"] for c in best["choices"]] == [every[i]["text"] for i in order[:2]]
    assert [c["index"] for c in best["choices"]] == [0, 1]
    del body["logprobs"]
    quiet = server.http.post("/v1/completions", json=body | {"best_of": 6}).json()["choices"]
    assert quiet[0]["text"] == every[order[0]]["text"]
    assert quiet[0]["logprobs"] is None


@pytest.mark.parametrize("early", [None, True])
def test_beams_are_those_of_llm(server: LiveServer, early: bool | None) -> None:
    with quire.LLM(device="cpu", num_blocks=256) as llm:
        params = quire.BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.8, early_stopping=bool(early))
        want = llm.beam_search(PROMPT, params)[0].sequences
    body = {"prompt": [PROMPT, "x ="], "use_beam_search": True, "n": 3, "max_tokens": 5, "length_penalty": 0.8}
    reply = server.http.post("/v1/completions", json=body | {"early_stopping": early}).json()
    assert [c["text"] for c in reply["choices"][:3]] == [each.text for each in want]
    assert [c["finish_reason"] for c in reply["choices"][:3]] == [each.finish_reason for each in want]
    assert len(reply["choices"]) == 6
    chat = {"messages": [{"role": "user", "content": "hi"}], "use_beam_search": True, "n": 2, "max_tokens": 3}
    said = server.http.post("/v1/chat/completions", json=chat).json()
    assert len(said["choices"]) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 500}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "n": 30}, "n"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": True, "length_penalty": 1e300}, "length_penalty"),
        ({"suffix": "behind"}, "suffix"),
    ],
)
def test_what_cannot_be_is_refused(server: LiveServer, fields: dict[str, object], param: str) -> None:
    reply = server.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3} | fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_with_a_gap(name: str, tmp_path: Path) -> None:
    found = FORMATS[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = [*found.marks, *found.ends]
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate([*alphabet, *marks])}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(marks)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert format_of(tokenizer) == found
    text = tokenizer.decode(infill(tokenizer, found, "one ", " two"), skip_special_tokens=False)
    want = "".join({"{before}": "one ", "{behind}": " two"}.get(part, part) for part in found.parts)
    assert text == want
    assert {tokenizer.token_to_id(mark) for mark in marks} == set(ends_of(tokenizer, found))


def test_a_model_without_such_tokens_has_no_format(server: LiveServer) -> None:
    assert format_of(server.tokenizer) is None
