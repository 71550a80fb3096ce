"""What takes long is done beside the event loop, on which the tokens of all streams wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from live_server import live
from stub_engine import StubEngine, stub_info


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
        limit = {"max_tokens": 1} if path.startswith("/v1") else {}
        reply = server.post(path, body | limit)
        assert reply.status_code == 200, reply.text
        here = sum(thread is server.thread for thread in threads)
        assert len(threads) > here <= 1, "what is small may stay: the prompt beside long lists of bad words"
