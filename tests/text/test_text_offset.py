"""`logprobs.text_offset`: where in the reply's text each token begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live_server import LiveServer, live
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from stub_engine import StubEngine, stub_info
from text_models import PYDOC, sentencepiece_folder
from text_tokenizers import KINDS, made, texts

pydoc = Tokenizer.from_folder(PYDOC)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live() as started:
        yield started


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    tokenizer = Tokenizer.from_folder(sentencepiece_folder(tmp_path_factory.mktemp("sentencepiece")))
    template = ChatTemplate({"default": "{{ messages[0]['content'] }}"}, tokenizer)
    with live(StubEngine(stub_info(eos_token_ids=(2,))), (tokenizer, template)) as started:
        yield started


def both(server: LiveServer, prompt: Any, **fields: Any) -> tuple[str, list[int]]:
    """Text and offsets, the same of a reply and of a stream."""
    choice = server.complete(prompt, logprobs=1, **fields)["choices"][0]
    events, _ = server.events("/v1/completions", {"prompt": prompt, "logprobs": 1, **fields})
    parts = [event["choices"][0] for event in events]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert [i for part in parts for i in part["logprobs"]["text_offset"]] == choice["logprobs"]["text_offset"]
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"])
    return choice["text"], choice["logprobs"]["text_offset"]


def test_characters_of_several_tokens_and_hidden_tokens(server: LiveServer) -> None:
    prompt, said = "日 x", "é🙂b"
    ids = pydoc.encode(said, add_special_tokens=False)
    server.stub.script = [ids[0], *ids[1:2], 2, *ids[2:]]
    pieces = [pydoc.id_to_bytes(i) for i in ids]
    places = [len(b"".join(pieces[:i]).decode(errors="ignore")) for i in range(len(ids))]
    want = [*places[:2], places[2], *places[2:], len(said)]
    assert both(server, prompt) == (said, want)
    assert both(server, prompt, return_tokens_as_token_ids=True) == (said, want)
    before = [len(b"".join(pydoc.id_to_bytes(j) for j in pydoc.encode(prompt)[:i]).decode(errors="ignore"))
              for i in range(len(pydoc.encode(prompt)))]  # fmt: skip
    for given in (prompt, pydoc.encode(prompt)):
        assert both(server, given, echo=True) == (prompt + said, [*before, *(len(prompt) + i for i in want)])


def test_the_token_before_a_text_takes_no_room(sentencepiece: LiveServer) -> None:
    tokenizer = sentencepiece.tokenizer
    sentencepiece.stub.script = tokenizer.encode("hello é", add_special_tokens=False)
    assert both(sentencepiece, "he hello", echo=True) == ("he hello hello é", [0, 0, 2, 8, 14, 15, 16])
    assert both(sentencepiece, "he hello") == (" hello é", [0, 6, 7, 8])
    ids = tokenizer.encode("he hello", add_special_tokens=False)
    assert both(sentencepiece, ids, echo=True) == ("he hello hello é", [0, 2, 8, 14, 15, 16])


def test_of_a_cut_text(server: LiveServer) -> None:
    server.stub.script = pydoc.encode("one two", add_special_tokens=False)
    _, offsets = both(server, "x")
    text, cut = both(server, "x", stop=["two"])
    assert text == "one " and cut == offsets[: len(cut)]
    assert both(server, [2, *pydoc.encode("y")], echo=True)[1][:2] == [0, len("<|user|>")]


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_of_an_encoded_text(kind: str, tmp_path: Path) -> None:
    """They grow, and the text from each on begins with what its token stands for."""
    tokenizer = made(kind, tmp_path)
    for text in texts()[:32]:
        ids, places = tokenizer.encode(text), tokenizer.offsets(text)
        assert len(places) == len(ids) and places == sorted(places)
        assert all(0 <= place <= len(text) for place in places)
        if kind in ("byte-level", "converted SentencePiece", "Metaspace never", "GGUF llama"):
            said = [tokenizer.decode(ids[:i]) for i in range(len(ids))]
            for i, place in enumerate(places if tokenizer.decode(ids) == text else ()):
                if not said[i].endswith("\ufffd"):
                    assert text[:place] == said[i], (text, i)
