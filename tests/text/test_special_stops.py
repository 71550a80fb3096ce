"""Stop strings with special tokens in them: found although such tokens are hidden, on every route."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live_server import LiveServer, live
from quire.core.params import SamplingParams
from quire.core.request import Output, Request
from quire.engine.outputs import RequestBuilder
from quire.server.batch import run
from quire.text.detokenizer import TextStream
from quire.text.tokenizer import Tokenizer
from text_models import PYDOC, sentencepiece_folder

USER, END = 2, 4
pydoc = Tokenizer.from_folder(PYDOC)


def plain(text: str) -> list[int]:
    return pydoc.encode(text, add_special_tokens=False)


SAID = [*plain("a b"), USER, *plain("\nc d")]
"""The stub's words, with a token among them that is hidden and does not end them."""
ROUTES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "completions": ("/v1/completions", {"prompt": "x"}, "stop", "text"),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "stop", "content"),
    "llama.cpp": ("/completion", {"prompt": "x"}, "stop", "content"),
    "ollama": ("/api/generate", {"model": "stub", "prompt": "x", "raw": True, "stream": False}, "options", "response"),
    "messages": ("/v1/messages", {"model": "stub", "max_tokens": 30, "messages": [{"role": "user", "content": "x"}]},
                 "stop_sequences", "text"),
    "tgi": ("/generate", {"inputs": "x", "parameters": {}}, "parameters", "generated_text"),
}  # fmt: skip


def with_stop(body: dict[str, Any], field: str, stop: str) -> dict[str, Any]:
    if field in ("options", "parameters"):
        return body | {field: {"stop": [stop]}}
    return body | {field: [stop]}


def texts_of(found: Any, key: str) -> Iterator[str]:
    """The strings under `key`, wherever they are."""
    if isinstance(found, dict):
        for name, value in found.items():
            if name == key and isinstance(value, str):
                yield value
            yield from texts_of(value, key)
    elif isinstance(found, list):
        for value in found:
            yield from texts_of(value, key)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live() as made:
        made.stub.script = SAID
        yield made


@pytest.mark.parametrize("stop", ["<|user|>", "<|user|>\n", "b<|user|>", "b<|user|>\nc"])
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_stops(server: LiveServer, route: str, stop: str) -> None:
    path, body, field, key = ROUTES[route]
    reply = server.post(path, with_stop(body, field, stop))
    assert reply.status_code == 200, reply.text
    left = "a " if stop.startswith("b") else "a b"
    want = left + stop if route == "tgi" else left  # which shows what stopped it
    assert [text for text in texts_of(reply.json(), key) if text] == [want]


def test_streams_never_show_it(server: LiveServer) -> None:
    body = {"prompt": "x", "stop": ["b<|user|>\nc"]}
    events, _ = server.events("/v1/completions", body)
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == "a "
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "b<|user|>\nc")
    shown = server.complete("x", stop=["<|user|>\n"], include_stop_str_in_output=True)["choices"][0]
    assert (shown["text"], shown["stop_reason"]) == ("a b<|user|>\n", "<|user|>\n")
    passed = server.complete("x", stop=["<|user|>x", "<|system|>", "<|user"])["choices"][0]
    assert (passed["text"], passed["stop_reason"]) == ("a b\nc d", None)


def test_batch_and_llm_stop(server: LiveServer, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "x", "stop": "<|user|>"}
    source.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}) + "\n")
    loop = server.engine._loop
    assert loop is not None
    asyncio.run_coroutine_threadsafe(run(server.app, source, target, 1 << 20, lambda _: None), loop).result(60)
    assert list(texts_of(json.loads(target.read_text()), "text")) == ["a b"]
    params = SamplingParams(stop=("<|user|>",))
    builder = RequestBuilder(Request(id="a", prompt=(9,), params=params, seed=0, arrival=0.0), "x", pydoc, [9])
    builder.push(Output(request_id="a", tokens=SAID))
    [said] = builder.outputs
    assert (said.text, said.stop_reason, said.token_ids[-1]) == ("a b", "<|user|>", USER)


def read(tokenizer: Tokenizer, ids: list[int], params: SamplingParams, rng: random.Random) -> tuple[str, str | None]:
    stream, text, by = TextStream(tokenizer, params), "", None
    while ids and by is None:
        run_of = rng.choice((1, 1, 2, 4))
        new, by = stream.push(ids[:run_of], final=len(ids) <= run_of)
        text, ids = text + new, ids[run_of:]
    return text, by


def expected(parts: list[tuple[str, bool]], stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """What a reader sees who gets a character at a time, hidden ones included."""
    whole = [(c, hidden) for text, hidden in parts for c in text]
    for end in range(1, len(whole) + 1):
        seen = [i for i in range(end) if not whole[i][1]]
        views = {s: range(end) if "<|" in s else seen for s in stops}
        hits = [
            (views[s][-len(s)], s)
            for s in stops
            if len(views[s]) >= len(s)
            and [whole[i][0] for i in views[s][-len(s) :]] == list(s)
            and views[s][-1] == end - 1
        ]
        if hits:
            start, stop = min(hits)
            return "".join(c for c, hidden in whole[:start] if not hidden) + (stop if include else ""), stop
    return "".join(c for c, hidden in whole if not hidden), None


def test_stops_do_not_depend_on_the_cuts() -> None:
    rng = random.Random(3)
    words, marks = ["a", "b", "\n", "ab", " a"], [1, 2, 3]
    names = {i: name for name, i in pydoc.special.items()}
    for _ in range(400):
        ids = [
            i
            for _ in range(rng.randint(1, 9))
            for i in ([rng.choice(marks)] if rng.random() < 0.3 else plain(rng.choice(words)))
        ]
        pieces = [names[rng.choice(marks)] if rng.random() < 0.5 else rng.choice(words) for _ in range(5)]
        stops = tuple("".join(pieces[i : i + rng.randint(1, 3)]) for i in range(rng.randint(1, 3)))
        include = rng.random() < 0.5
        parts = [(names[i], True) if i in names else (pydoc.id_to_text(i), False) for i in ids]
        params = SamplingParams(stop=stops, include_stop_str_in_output=include)
        assert read(pydoc, ids, params, rng) == expected(parts, stops, include), (ids, stops)


def test_sentencepiece_stops_at_its_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(sentencepiece_folder(tmp_path))
    ids = [*tokenizer.encode("hello he", add_special_tokens=False), 2, *tokenizer.encode("he")]
    rng = random.Random(0)
    assert read(tokenizer, ids, SamplingParams(stop=("</s>",)), rng) == ("hello he", "</s>")
    assert read(tokenizer, ids, SamplingParams(stop=("he</s>",)), rng) == ("hello ", "he</s>")
    assert read(tokenizer, ids, SamplingParams(stop=("</s>",), min_tokens=len(ids)), rng) == ("hello he he", None)
    shown = SamplingParams(stop=("</s>",), skip_special_tokens=False)
    assert read(tokenizer, ids, shown, rng) == ("hello he", "</s>")
