"""What takes long is done beside the event loop, on which the tokens of all streams wait."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from tokenizers import models, pre_tokenizers

from live_server import live, wait_until
from stub_engine import StubEngine, stub_info

HI = [{"role": "user", "content": "hi"}]


def test_large_texts_are_tokenized_off_the_loop_with_the_same_result() -> None:
    info = stub_info(max_model_len=1 << 17, num_blocks=1 << 13)
    with live(StubEngine(info)) as server:
        text = "for item in items:\n    print(item)\n" * 2000
        server.complete(text, max_tokens=1)
        server.chat(text, max_tokens=1)
        assert list(server.stub.submitted[0].prompt) == server.tokenizer.encode(text)
        assert list(server.stub.submitted[1].prompt) == server.template.encode([{"role": "user", "content": text}])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a short one"] * 100}),
        ("/v1/completions", {"prompt": "a", "bad_words": ["x" * 200] * 50}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 65}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "reasoning_content": "x" * 20_000}]}),
        ("/tokenize", {"prompt": "x " * 20_000}),
        ("/detokenize", {"tokens": [5] * 20_000}),
    ],
    ids=("prompts", "bad words", "messages", "reasoning", "tokenize", "detokenize"),
)
def test_much_work_is_done_off_the_loop(path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **more: (threads.append(threading.current_thread()), work(*args, **more))[1]

    with live(StubEngine(stub_info(max_model_len=1 << 15))) as server:
        for name in ("encode", "decode"):
            monkeypatch.setattr(server.tokenizer, name, noting(getattr(server.tokenizer, name)))
        monkeypatch.setattr(server.template, "marked", noting(server.template.marked))
        limit = {"max_tokens": 1} if path.startswith("/v1") else {}
        reply = server.post(path, body | limit)
        assert reply.status_code == 200, reply.text
        here = sum(thread is server.thread for thread in threads)
        assert len(threads) > here <= 1, "what is small may stay: the prompt beside long lists of bad words"


def test_few_texts_are_tokenized_at_once_and_nothing_else_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither other work in threads, as /metrics, nor small requests."""
    running, most, release = 0, 0, threading.Event()

    def encode(*_: Any) -> list[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        release.wait(10)
        running -= 1
        return [5]

    with live(StubEngine(stub_info(max_model_len=1 << 15))) as server, ThreadPoolExecutor(12) as clients:
        small = server.tokenizer.encode
        monkeypatch.setattr(
            server.tokenizer, "encode", lambda text, *a: (encode if len(text) > 20_000 else small)(text, *a)
        )
        body = {"prompt": "x " * 15_000, "max_tokens": 1}
        posts = [clients.submit(server.post, "/v1/completions", body) for _ in range(12)]
        wait_until(lambda: server.engine.in_flight == 12)
        try:
            assert server.http.get("/metrics").status_code == 200
            server.complete("small", max_tokens=1)
            server.chat("small", max_tokens=1)
        finally:
            release.set()
        assert {post.result().status_code for post in posts} == {200} and most == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_full_queue_is_refused_before_any_text_is_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = StubEngine(stub_info(max_num_queued_reqs=2))
    with live(stub) as server, ThreadPoolExecutor(1) as client:
        release, read = threading.Event(), list[str]()

        def slow(work: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **more: (read.append("text"), release.wait(10), work(*args, **more))[2]

        monkeypatch.setattr(server.tokenizer, "encode", slow(server.tokenizer.encode))
        monkeypatch.setattr(server.template, "marked", slow(server.template.marked))
        first = client.submit(server.post, "/v1/chat/completions", {"messages": HI, "n": 2, "max_tokens": 1})
        wait_until(lambda: len(read) == 1)
        body = {"prompt": ["x"] * 2} if path == "/v1/completions" else {"messages": HI}
        began = time.monotonic()
        refused = server.post(path, body)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert time.monotonic() - began < 5 and len(read) == 1, "its places were held while its text was read"
        release.set()
        assert first.result().status_code == 200
        assert server.post(path, body | {"max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 30_000}),
        ("/v1/completions", {"prompt": ["a", "x" * 30_000]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 30_000}]}),
    ],
)
def test_a_text_that_cannot_fit_is_refused_unread(path: str, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with live() as server:
        encode, read = server.tokenizer.encode, list[str]()
        monkeypatch.setattr(
            server.tokenizer, "encode", lambda text, *a, **k: (read.append(text), encode(text, *a, **k))[1]
        )
        error = server.post(path, body).json()["error"]
        assert error["code"] == "context_length_exceeded" and error["param"] in ("prompt", "messages")
        assert "30000 characters" in error["message"] or path != "/v1/completions"
        assert not read and server.engine.in_flight == 0
        assert server.post(path, body | {"truncate_prompt_tokens": 9, "max_tokens": 1}).status_code == 200
        assert server.post("/tokenize", {"prompt": "x" * 30_000}).json()["count"] > 256


@pytest.mark.skipif(not hasattr(pre_tokenizers, "FixedLength"), reason="nothing of tokenizers 0.21 is known to panic")
def test_a_panic_of_the_tokenizers_library_is_a_400_and_anywhere_else_a_500(monkeypatch: pytest.MonkeyPatch) -> None:
    with live() as server:
        broken = server.tokenizer._backend.__class__(models.BPE({"a": 0}, []))
        broken.pre_tokenizer = pre_tokenizers.FixedLength(0)
        for text in ("a", "a" * 17_000):
            with monkeypatch.context() as patch:
                patch.setattr(server.tokenizer, "_backend", broken)
                for path in ("/v1/completions", "/tokenize"):
                    reply = server.post(path, {"prompt": text})
                    assert reply.status_code == 400, reply.text
        with monkeypatch.context() as patch:
            patch.setattr(server.tokenizer, "encode", lambda *_: broken.encode("a"))
            for text in ("a", "a" * 17_000):
                assert server.post("/tokenize", {"prompt": text}).status_code == 500
        server.complete("a", max_tokens=1)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_is_parsed_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = list[bytes | str]()

    def noting(parse: Callable[..., Any]) -> Callable[..., Any]:
        return lambda data, **more: (parsed.append(data), parse(data, **more))[1]

    content = json.dumps({"prompt": "a"}).encode()
    with live() as server, monkeypatch.context() as patch:
        patch.setattr(json, "loads", noting(json.loads))
        patch.setattr(msgspec.json, "decode", noting(msgspec.json.decode))
        assert server.http.post(path, content=content, headers={"content-type": "application/json"}).status_code == 200
        assert len(parsed) == 1
