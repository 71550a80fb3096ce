"""What follows a prompt: the text of the prompt and that of its continuation are the text of all tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from live_server import LiveServer, live
from quire.core.params import SamplingParams
from quire.core.request import Output, Request
from quire.engine.outputs import RequestBuilder
from quire.text import detokenizer as text_edge
from quire.text.detokenizer import TextStream
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from stub_engine import StubEngine, stub_info
from text_models import sentencepiece_folder
from text_tokenizers import KINDS, made, texts


def continued(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool, rng: random.Random) -> str:
    """The text of `ids` behind `prompt`, pushed in random runs."""
    stream = TextStream(tokenizer, SamplingParams(skip_special_tokens=skip), prompt=prompt)
    text = ""
    while ids:
        run = rng.choice((1, 1, 2, 5))
        text += stream.push(ids[:run])[0]
        ids = ids[run:]
    return text + stream.push([], final=True)[0]


def whole_characters(tokenizer: Tokenizer, ids: list[int], at: int, skip: bool) -> bool:
    """Whether the prompt `ids[:at]` ends where a character does, by decoding alone."""
    return not tokenizer.decode(ids[:at], skip).endswith("\ufffd")


def check(tokenizer: Tokenizer, text: str, rng: random.Random, every: int) -> None:
    """At each `every`-th place where the tokens of `text` can be split."""
    ids = tokenizer.encode(text)
    for skip in (True, False):
        whole = tokenizer.decode(ids, skip)
        for at in range(rng.randrange(every), len(ids) + 1, every):
            found = continued(tokenizer, ids[:at], ids[at:], skip, rng)
            if whole_characters(tokenizer, ids, at, skip):
                assert tokenizer.decode(ids[:at], skip) + found == whole, (text, at, skip)
            elif not skip:
                assert text_edge.prompt_text(tokenizer, ids[:at]) + found == whole, (text, at)
            else:
                assert whole.endswith(found) and not found.startswith("\ufffd"), (text, at)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_continuation_are_the_whole_text(kind: str, tmp_path: Path) -> None:
    tokenizer, rng = made(kind, tmp_path), random.Random(kind)
    for text in texts()[::8]:
        check(tokenizer, text, rng, every=5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_continuation_at_every_split(kind: str, tmp_path: Path) -> None:
    tokenizer, rng = made(kind, tmp_path), random.Random(kind)
    for text in texts():
        check(tokenizer, text, rng, every=1)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(sentencepiece_folder(tmp_path_factory.mktemp("sentencepiece")))


@pytest.fixture(scope="module")
def server(sentencepiece: Tokenizer) -> Iterator[LiveServer]:
    """A server of a SentencePiece model; its stub says what `stub.script` holds."""
    template = ChatTemplate({"default": TEMPLATE}, sentencepiece)
    with live(StubEngine(stub_info(eos_token_ids=(2,))), (sentencepiece, template)) as made_server:
        yield made_server


TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
PROMPT, SAID = "he said", " hello hello"
ROUTES: dict[str, tuple[str, dict[str, Any], Sequence[Any]]] = {
    "completions": ("/v1/completions", {"prompt": PROMPT}, ("choices", 0, "text")),
    "completions n": ("/v1/completions", {"prompt": PROMPT, "n": 2}, ("choices", 1, "text")),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content":
             PROMPT}], "continue_final_message": True, "add_generation_prompt": False},
             ("choices", 0, "message", "content")),
    "responses": ("/v1/responses", {"input": PROMPT, "store": False}, ("output", 0, "content", 0, "text")),
    "tgi": ("/generate", {"inputs": PROMPT}, ("generated_text",)),
    "llama.cpp": ("/completion", {"prompt": PROMPT, "n_predict": 20}, ("content",)),
    "ollama": ("/api/generate", {"model": "stub", "prompt": PROMPT, "raw": True, "stream": False}, ("response",)),
    "messages": ("/v1/messages", {"model": "stub", "max_tokens": 20, "messages": [{"role": "user", "content": PROMPT}]},
                 ("content", 0, "text")),
}  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
def test_routes_keep_the_space(server: LiveServer, sentencepiece: Tokenizer, route: str) -> None:
    path, body, at = ROUTES[route]
    server.stub.script = [*sentencepiece.encode(SAID[1:], add_special_tokens=False), 2]
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    for key in at:
        found = found[key]
    assert found == SAID


def test_streams_and_echoes_keep_the_space(server: LiveServer, sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode(SAID[1:], add_special_tokens=False)
    server.stub.script = [*ids, 2]
    events, _ = server.events("/v1/completions", {"prompt": PROMPT})
    assert "".join(e["choices"][0]["text"] for e in events) == SAID
    prompt = sentencepiece.encode(PROMPT, add_special_tokens=False)
    for given in (PROMPT, prompt):
        said = server.complete(given, echo=True)["choices"][0]["text"]
        assert said == PROMPT + SAID == sentencepiece.decode([*prompt, *ids])


def test_llm_keeps_the_space(sentencepiece: Tokenizer) -> None:
    prompt, ids = sentencepiece.encode(PROMPT), sentencepiece.encode(SAID[1:], add_special_tokens=False)
    request = Request(id="a", prompt=tuple(prompt), params=SamplingParams(n=2), seed=0, arrival=0.0)
    builder = RequestBuilder(request, PROMPT, sentencepiece, prompt)
    for index in range(2):
        for token in ids:
            builder.push(Output(request_id="a", index=index, tokens=[token]))
    assert [each.text for each in builder.result().outputs] == [SAID, SAID]


def test_a_new_text_has_no_space_before_it(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("hello", add_special_tokens=False)
    assert text_edge.continuation(sentencepiece, [], ids) == text_edge.continuation(sentencepiece, [1], ids) == "hello"
    assert text_edge.continuation(sentencepiece, [1, *ids, 2], ids) == " hello"


def test_a_character_begun_by_the_prompt_comes_whole(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("日本", add_special_tokens=False)[1:]
    assert len(ids) == 6
    assert text_edge.continuation(sentencepiece, ids[:4], ids[4:]) == "本"
    assert text_edge.prompt_text(sentencepiece, ids[:4]) == "日"
    assert text_edge.continuation(sentencepiece, ids[:4], [sentencepiece.token_to_id("a") or 0]) == "\ufffda"
