"""Log-probabilities of prompts: made in pieces within the planned memory, bounded, and written off the loop."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace
from torch import Tensor

from engine_answers import engine_of
from live_server import live
from oracle import BACKENDS
from quire.core.params import SamplingParams
from quire.core.plan import Chunk
from quire.core.request import Request
from quire.core.sequence import Sequence
from quire.engine.local import LocalEngine
from quire.run.builder import wanted_rows
from quire.sample.sampler import Sampler
from quire.server.apis.openai.logprobs import LogprobWriter
from quire.server.apis.openai.replies import ChatLogprobs, Completion, CompletionChoice, CompletionLogprobs
from quire.server.http import json_parts
from stub_engine import StubEngine, stub_info

native = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


def scored(vocab: int) -> list[Request]:
    """Prompts of 1 to 130 tokens whose log-probabilities are wanted, beside two that draw alone, one of them edited."""
    rng = random.Random(0)
    params = SamplingParams(max_tokens=3, temperature=0.7, prompt_logprobs=2, logprobs=1)
    kinds = [params, params, replace(params, prompt_logprobs=None, repetition_penalty=1.2), params, params,
             replace(params, prompt_logprobs=None)]  # fmt: skip
    lengths = (130, 1, 9, 64, 65, 3)
    prompts = [tuple(rng.randrange(vocab) for _ in range(n)) for n in lengths]
    return [
        Request(id=str(i), prompt=prompt, params=kind, seed=i, arrival=0.0)
        for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]


def answers(engine: LocalEngine, requests: list[Request]) -> dict[str, list[Any]]:
    """All that came of each, in order."""
    found: dict[str, list[Any]] = {request.id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.engine.has_work:
        report = engine.poll(0)
        for out in report.outputs if report else ():
            assert out.error is None
            found[out.request_id] += [out.tokens, out.logprobs, out.prompt_logprobs]
    return found


@native
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}, {"enforce_eager": True}], ids=str)
def test_logits_of_prompts_are_made_in_pieces_that_change_no_bit(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = list[int]()
    call = Sampler.__call__

    def noting(self: Sampler, logits: Tensor, *args: Any, **more: Any) -> Any:
        most.append(len(logits))
        return call(self, logits, *args, **more)

    monkeypatch.setattr(Sampler, "__call__", noting)
    options = {"max_num_batched_tokens": 160, "max_num_seqs": 6} | options
    whole = engine_of(**options)
    requests = scored(whole.info.vocab_size)
    want = answers(whole, requests)
    assert max(most) > 100, "in one piece, as the rows of a step are fewer than one has"
    assert len(want["0"][2]) == 129
    monkeypatch.setattr("quire.run.step.LOGITS_AT_ONCE", 1)
    for rows in (6, 7):
        most.clear()
        engine = engine_of(**(options | {"max_num_seqs": rows}))
        assert engine.engine.runner.step.most_logits == rows
        assert answers(engine, requests) == want
        assert max(most) == rows


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_json_in_pieces_is_the_same_json(count: int) -> None:
    rows = [None, *({str(i): {"logprob": -i / 3, "decoded_token": 'é\n"' * i}} for i in range(count))]
    logprobs = CompletionLogprobs(tokens=["a"] * count, top_logprobs=rows[:count])
    choices = [CompletionChoice(index=i, text="x" * 99, logprobs=logprobs if i else None) for i in range(count)]
    reply = Completion(id="a", created=1, model="m", system_fingerprint="f", choices=choices)
    for value in (reply, ChatLogprobs(content=[]), replace(reply, usage=None), rows, 5):
        assert b"".join(json_parts.encode(value)) == msgspec.json.encode(value)
    made = CompletionChoice(index=0, text="", prompt_logprobs=iter(rows))
    assert b"".join(json_parts.encode(made)) == msgspec.json.encode(replace(made, prompt_logprobs=rows))  # type: ignore[arg-type]
    assert msgspec.json.decode(msgspec.json.encode(replace(made, prompt_logprobs=UNSET)))["text"] == ""
    assert len(json_parts.encode("x" * json_parts.PART)) == 1 and sum(map(len, json_parts.encode(rows))) > 5


def test_more_than_the_server_gives_is_refused_by_name() -> None:
    tokens = list(range(100, 150))
    with live(StubEngine(), max_prompt_logprobs=300) as server:
        messages = [{"role": "user", "content": "hi " * 20}]
        chat = server.template.encode(messages)
        assert 300 / 21 < len(chat) < 300 / 2
        for body, param in (
            ({"prompt": tokens, "prompt_logprobs": 5}, None),  # 50 * 6
            ({"prompt": tokens, "prompt_logprobs": 6}, "prompt_logprobs"),
            ({"prompt": [tokens, tokens], "prompt_logprobs": 2}, None),
            ({"prompt": [tokens, tokens], "prompt_logprobs": 3}, "prompt_logprobs"),
            ({"prompt": tokens, "n": 3, "prompt_logprobs": 1}, None),
            ({"prompt": tokens, "n": 3, "prompt_logprobs": 2}, "prompt_logprobs"),
            ({"prompt": tokens, "echo": True, "logprobs": 5}, None),
            ({"prompt": tokens, "echo": True, "logprobs": 6}, "logprobs"),
            ({"prompt": tokens, "echo": True, "logprobs": 6, "stream": True}, "logprobs"),
            ({"prompt": tokens, "logprobs": 20}, None),
            ({"messages": messages, "prompt_logprobs": 20}, "prompt_logprobs"),
            ({"messages": messages, "prompt_logprobs": 1, "n": 9}, None),
        ):
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            reply = server.post(path, body | {"max_tokens": 1})
            if param is None:
                assert reply.status_code == 200, (body, reply.text)
            else:
                error = reply.json()["error"]
                assert reply.status_code == 400 and error["param"] == param, (body, error)
                assert "at most 300 (--max-prompt-logprobs)" in error["message"]
        assert server.engine.in_flight == 0


async def watch(turns: list[float]) -> None:
    """Note the time of the processor that the loop took between two wishes to go on after a millisecond."""
    last = time.thread_time()
    while True:
        await asyncio.sleep(0.001)
        now = time.thread_time()
        turns.append(now - last)
        last = now


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "body",
    [
        {"prompt_logprobs": 20},
        {"echo": True, "logprobs": 20},
        {"echo": True, "logprobs": 20, "stream": True},
        {"echo": True, "logprobs": 6, "n": 3, "stream": True},
    ],
    ids=str,
)
def test_large_replies_are_written_off_the_loop_in_pieces(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a reply is written on the loop, one of its turns takes 0.07 s at least."""
    encoded: list[int] = []
    write = msgspec.json.encode

    def noting(value: Any) -> bytes:
        data = write(value)
        encoded.append(len(data))
        return data

    writers: set[threading.Thread] = set()
    name = LogprobWriter.name

    def naming(self: LogprobWriter, token: int) -> str:
        writers.add(threading.current_thread())
        return name(self, token)

    prompt = {"prompt": [100 + i % 1000 for i in range(6000)]}
    turns: list[float] = []
    with live(StubEngine(stub_info(max_model_len=1 << 14))) as server, ThreadPoolExecutor(1) as client:
        monkeypatch.setattr(msgspec.json, "encode", noting)
        monkeypatch.setattr(LogprobWriter, "name", naming)
        loop = server.engine._loop
        assert loop is not None
        watcher = asyncio.run_coroutine_threadsafe(watch(turns), loop)
        reply = client.submit(server.post, "/v1/completions", body | prompt | {"max_tokens": 1})
        answered = 0
        while not reply.done():
            assert server.http.get("/livez").status_code == 200
            answered += 1
        data = reply.result()
        assert data.status_code == 200 and data.content.count(b"5.5") >= 6000
        watcher.cancel()
        assert len(data.content) > 1_500_000 and max(encoded) < 300_000, "64 tokens of the prompt at once"
        assert writers and server.thread not in writers
        assert answered > 3 and len(turns) > 5 and max(turns) < 0.04


def test_rows_that_want_logits_score_the_prompt_or_draw() -> None:
    request = Request(id="a", prompt=(1, 2, 3), params=SamplingParams(), seed=0, arrival=0.0)
    seq = Sequence(request)
    assert wanted_rows(Chunk(seq, 0, 2, 0)) == [] and wanted_rows(Chunk(seq, 0, 3, 1)) == [(2, None)]
    assert wanted_rows(Chunk(seq, 0, 3, 3)) == [(0, 2), (1, 3), (2, None)]
    seq.tokens += [4, 5]  # and computed again
    assert wanted_rows(Chunk(seq, 0, 5, 5)) == [(0, 2), (1, 3), (4, None)]
    seq.draft.tokens = [6, 7]
    assert wanted_rows(Chunk(seq, 4, 3, 3)) == [(4, None), (5, None), (6, None)]
