"""The shipped thing: `quire serve` as a process, the embedded model in its engine process, the `openai` client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from openai import BadRequestError, OpenAI

from quire import LLM, SamplingParams
from quire.model.disk.checkpoint import EMBEDDED
from serving_process import serving

QUESTIONS = [json.loads(line) for line in (EMBEDDED / "questions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving("--max-num-seqs", "16") as url:
        yield url


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=server + "/v1", api_key="none", max_retries=0) as openai:
        yield openai


def gauge(server: str, name: str) -> float:
    """The value of one metric."""
    text = httpx.get(server + "/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def wait_for(condition: object, seconds: float = 5.0) -> bool:
    """Poll until `condition()` holds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


def test_models(client: OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["pydoc"]


def test_many_chats_at_once_give_the_known_answers(client: OpenAI) -> None:
    rows = QUESTIONS[::100]

    def ask(row: dict[str, str]) -> str:
        messages = [{"role": "user", "content": row["question"]}]
        reply = client.chat.completions.create(model="pydoc", messages=messages, temperature=0)  # type: ignore[arg-type]
        assert reply.choices[0].finish_reason == "stop" and reply.usage
        return reply.choices[0].message.content or ""

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, rows))
    exact = sum(a == r["answer"] for a, r in zip(answers, rows, strict=True))
    assert exact >= 0.9 * len(rows)


def test_streaming_equals_not_streaming(client: OpenAI) -> None:
    options = {
        "model": "pydoc",
        "prompt": "for key, value in ",
        "max_tokens": 40,
        "temperature": 0.8,
        "seed": 5,
        "n": 2,
    }
    whole = client.completions.create(**options)  # type: ignore[call-overload]
    texts, usage = ["", ""], None
    for event in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):  # type: ignore[call-overload]
        for choice in event.choices:
            texts[choice.index] += choice.text
        usage = event.usage or usage
    assert texts == [c.text for c in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_stop_strings_logprobs_and_echo(client: OpenAI) -> None:
    reply = client.completions.create(
        model="pydoc", prompt="import os\n", max_tokens=30, temperature=0, stop=["\n"], logprobs=3, echo=True
    )
    choice = reply.choices[0]
    assert choice.text.startswith("import os\n") and choice.text.count("\n") == 1 and choice.finish_reason == "stop"
    assert choice.logprobs and len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)


def test_a_huge_prompt_is_refused_by_its_length(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="1024"):
        client.completions.create(model="pydoc", prompt="x = 1\n" * 100_000, max_tokens=5)


def test_a_client_that_leaves_frees_its_blocks(server: str, client: OpenAI) -> None:
    assert wait_for(lambda: gauge(server, "vllm:kv_cache_usage_perc") == 0)
    body = {"model": "pydoc", "prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 8}
    for _ in range(5):
        with httpx.stream("POST", server + "/v1/completions", json=body) as response:
            next(response.iter_lines())
        assert wait_for(lambda: gauge(server, "vllm:num_requests_running") == 0)
        assert wait_for(lambda: gauge(server, "vllm:kv_cache_usage_perc") == 0)


def test_a_gguf_file_is_served(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package writes the test files; it is in the dev extra")
    from gguf.constants import GGMLQuantizationType

    from gguf_models import write_gguf

    path = tmp_path / "tiny.gguf"
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 320}
    write_gguf(path, "mixtral", lambda name: GGMLQuantizationType.Q8_0, **experts)
    want = LLM(str(path)).generate(["the other one"], SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    with serving("--model", str(path)) as url, OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as openai:
        assert [model.id for model in openai.models.list()] == ["tiny"]
        got = openai.completions.create(model="tiny", prompt="the other one", temperature=0, max_tokens=12)
        assert got.choices[0].text == want.text and got.usage.completion_tokens == len(want.token_ids)
        chat = openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "on the"}], temperature=0, max_tokens=5
        )
        assert chat.usage.completion_tokens > 0


def test_a_server_that_speculates_says_so_in_usage_and_metrics(client: OpenAI) -> None:
    drafts = '{"method": "self", "quantization": "int4", "num_speculative_tokens": 3, "adaptive": false}'
    asked = {"model": "pydoc", "prompt": "def read(self, n):\n", "max_tokens": 40, "temperature": 0.7, "seed": 3}
    want = client.completions.create(**asked)  # type: ignore[call-overload]
    with serving("--speculative-config", drafts) as url, OpenAI(base_url=url + "/v1", api_key="none") as openai:
        got = openai.completions.create(**asked)  # type: ignore[call-overload]
        assert got.choices[0].text == want.choices[0].text
        details = got.usage.completion_tokens_details
        assert details.accepted_prediction_tokens > 5 and details.rejected_prediction_tokens > 0
        assert want.usage.completion_tokens_details is None
        accepted = gauge(url, "vllm:spec_decode_num_accepted_tokens_total")
        assert details.accepted_prediction_tokens <= accepted < gauge(url, "vllm:spec_decode_num_draft_tokens_total")
        assert gauge(url, "vllm:spec_decode_num_accepted_tokens_per_pos") == accepted
