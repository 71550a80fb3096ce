"""Ollama's API, by Ollama's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live_server import LiveServer, live, text_tools
from quire.core.structured import StructuredOutputsParams
from quire.text.infill import BEFORE, BEHIND, Format, infill
from stub_engine import StubEngine, stub_info
from tool_replies import SAID, TOOLS, saying

ollama = pytest.importorskip("ollama", reason="the extra 'clients' is not installed")
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with saying(SAID) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[Any]:
    with ollama.Client(host=server.url, timeout=10.0) as made:
        yield made


def prompt(server: LiveServer) -> str:
    return server.tokenizer.decode(server.stub.submitted[-1].prompt)


def test_a_conversation(server: LiveServer, client: Any) -> None:
    reply = client.chat(model="stub:latest", messages=HI, tools=TOOLS, think=True)
    assert (reply.message.content, reply.message.thinking) == ("Let me see.", "Hm.")
    assert [dict(c.function.arguments) for c in reply.message.tool_calls] == [{"city": "A"}, {"city": "B"}]
    assert (reply.done, reply.done_reason, reply.model) == (True, "stop", "stub:latest")
    assert reply.prompt_eval_count == len(server.stub.submitted[-1].prompt) and reply.eval_count > 20
    assert reply.total_duration >= reply.prompt_eval_duration + reply.eval_duration - 10_000_000


def test_lines_say_what_a_whole_answer_says(server: LiveServer, client: Any) -> None:
    lines = list(client.chat(model="stub", messages=HI, tools=TOOLS, stream=True))
    assert "".join(line.message.content for line in lines) == "Let me see."
    assert "".join(line.message.thinking or "" for line in lines) == "Hm."
    calls = [call.function for line in lines for call in line.message.tool_calls or ()]
    assert [(c.name, dict(c.arguments)) for c in calls] == [("weather", {"city": "A"}), ("weather", {"city": "B"})]
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True] and lines[-1].eval_count > 20
    raw = server.post("/api/chat", {"model": "stub", "messages": HI})
    assert raw.headers["content-type"] == "application/x-ndjson"
    assert len([json.loads(line) for line in raw.text.splitlines()]) > 5


def test_thinking_is_a_switch(server: LiveServer, client: Any) -> None:
    reply = client.chat(model="stub", messages=HI, think=False)
    assert prompt(server).endswith("<think></think>") and reply.message.thinking is None


def test_history_reaches_the_template(server: LiveServer, client: Any) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    history = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
    history.append({"role": "tool", "tool_name": "weather", "content": "sunny"})
    client.chat(model="stub", messages=history, tools=TOOLS, options={"num_predict": 1})
    assert prompt(server).startswith("<user>hi<assistant>[weather Rome]<tool>sunny[{")


def test_defaults_are_ollamas(server: LiveServer, client: Any) -> None:
    client.chat(model="stub", messages=HI, options={"num_predict": 1, "top_p": 0.5})
    params = server.stub.submitted[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.8, 40, 0.5, 1.1)


def test_a_prompt(server: LiveServer, client: Any) -> None:
    ask = client.generate
    options = {"num_predict": 4, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 7, "stop": ["x"],
               "repeat_penalty": 1.2}  # fmt: skip
    reply = ask(model="stub", prompt="hi", system="Be short.", options=options, keep_alive="5m")
    params = server.stub.submitted[-1].params
    assert prompt(server).startswith("<system>Be short.<user>hi") and reply.done_reason == "length"
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (4, 0.5, 3, 0.9)
    assert (params.seed, params.stop, params.repetition_penalty) == (7, ("x",), 1.2)
    raw = ask(model="stub", prompt="hi", raw=True, options={"num_predict": -1})
    assert prompt(server) == "hi" and raw.response == SAID and raw.thinking is None
    assert ask(model="stub").done_reason == "load"
    assert "".join(line.response for line in ask(model="stub", prompt="hi", stream=True)) == SAID[SAID.index("Let") :]


def test_a_gap_is_filled_without_the_template(server: LiveServer, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gap = Format(("<|user|>", BEFORE, "<|assistant|>", BEHIND))
    monkeypatch.setattr("quire.server.apis.openai.completions.format_of", lambda _: gap)
    monkeypatch.setattr("quire.server.apis.ollama.models.format_of", lambda _: gap)
    client.generate(model="stub", prompt="one", suffix="two", options={"num_predict": 1})
    assert list(server.stub.submitted[-1].prompt) == infill(server.tokenizer, gap, "one", "two")
    assert "insert" in client.show("stub").capabilities


def test_log_probabilities(server: LiveServer, client: Any) -> None:
    reply = client.chat(model="stub", messages=HI, tools=TOOLS, logprobs=True, top_logprobs=2)
    assert "".join(entry.token for entry in reply.logprobs).strip() == "Let me see."
    assert all(len(entry.top_logprobs) == 2 for entry in reply.logprobs)


NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}


def test_a_shape_is_a_grammar() -> None:
    with live() as server, ollama.Client(host=server.url) as client:
        for shape, given in (
            ("json", {"json_object": True}),
            (NAMED, {"json": NAMED | {"additionalProperties": False}}),
        ):
            client.generate(model="stub", prompt="hi", raw=True, format=shape, options={"num_predict": 60})
            grammar = server.stub.submitted[-1].grammar
            direct = {"structured_outputs": given, "max_tokens": 60}
            server.complete("hi", **direct)
            assert grammar and server.stub.submitted[-1].grammar == grammar
            assert StructuredOutputsParams(**given).kind


def test_what_is_served(server: LiveServer, client: Any) -> None:
    asked = client
    [listed], [running] = asked.list().models, asked.ps().models
    assert listed.model == running.model == "stub" and listed.digest == running.digest and listed.size == 1000
    assert running.context_length == 2048
    shown = asked.show("stub")
    assert shown.capabilities == ["completion", "embedding", "tools", "thinking"] and "tool_call" in shown.template
    assert next(v for k, v in shown.modelinfo.items() if k.endswith(".context_length")) == 2048
    assert set(server.http.get("/api/version").json()) == {"version"}


def test_a_shape_that_the_limit_closes_ends_by_length() -> None:
    with live() as server, ollama.Client(host=server.url) as client:
        server.stub.script = server.tokenizer.encode('{"a": 1}', add_special_tokens=False)
        for limit, reason in ((60, "stop"), (len(server.stub.script) + 1, "length")):
            options = {"num_predict": limit}
            reply = client.generate(model="stub", prompt="hi", raw=True, format=NAMED, options=options)
            assert (reply.response, reply.done_reason) == ('{"a": 1}', reason)


def test_a_model_that_is_to_be_unloaded_stays_and_the_reply_says_so(server: LiveServer) -> None:
    for alive in (0, "0s", "5m", None, -1):
        reply = server.post("/api/generate", {"model": "stub", "keep_alive": alive})
        assert reply.json()["done_reason"] == "load"
        assert ("keep_alive" in reply.headers.get("warning", "")) == (alive is not None)


def test_models_are_managed_by_commands(server: LiveServer) -> None:
    for method, path, command in (
        ("POST", "/api/pull", "quire pull"),
        ("POST", "/api/create", "quire compress"),
        ("POST", "/api/copy", "--served-model-name"),
        ("DELETE", "/api/delete", "quire rm"),
    ):
        reply = server.http.request(method, path, json={"model": "smollm2"})
        assert reply.status_code == 501 and command in reply.json()["error"], path


def test_a_file_is_of_its_own_family(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    info = stub_info(folder=str(tmp_path / "model.gguf"), family="llama", quantization="gguf Q4_1")
    with live(StubEngine(info), tools=text_tools()) as server:
        [listed] = server.http.get("/api/tags").json()["models"]
        shown = server.post("/api/show", {"model": listed["name"]}).json()
    assert listed["details"] == shown["details"]
    assert (listed["details"]["family"], listed["details"]["format"]) == ("llama", "gguf")
    assert shown["model_info"]["general.architecture"] == "llama" and "llama.vocab_size" in shown["model_info"]


def test_bodies_need_no_type_unless_a_page_sends_them(server: LiveServer) -> None:
    body = json.dumps({"model": "stub", "prompt": "hi", "options": {"num_predict": 1}})
    for kind in ({}, {"content-type": "application/x-www-form-urlencoded"}):
        assert server.http.post("/api/generate", content=body, headers=kind).status_code == 200
        page = server.http.post("/api/generate", content=body, headers={**kind, "origin": "http://evil.example"})
        assert page.status_code == 415
    assert server.http.post("/v1/completions", content='{"prompt": "a"}').status_code == 415


def test_what_is_ignored_is_named(server: LiveServer) -> None:
    body = {"model": "stub", "prompt": "hi", "keep_alive": "5m", "options": {"num_ctx": 5, "num_predict": 1}}
    told = server.post("/api/generate", body).headers["warning"]
    assert "keep_alive" in told and "options.num_ctx" in told


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": "other"}, "model"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ({"format": 5}, "format"),
        ({"think": "much"}, "think"),
        ({"raw": True, "think": True}, "think"),
        ({"raw": True, "system": "Be short."}, "system"),
        ({"suffix": "end"}, "suffix"),
        ({"images": ["aGk="]}, "images[0]"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1, 2]}, "context"),
    ],
    ids=str,
)
def test_what_is_refused(server: LiveServer, fields: dict[str, Any], named: str) -> None:
    reply = server.post("/api/generate", {"model": "stub", "prompt": "hi", **fields})
    assert reply.status_code == (404 if named == "model" else 400), reply.text
    assert reply.json()["error"].startswith(f"{named}:")


def test_a_failure_in_a_stream_is_a_line() -> None:
    with live() as server, ollama.Client(host=server.url) as client:
        server.stub.poison = 3
        with pytest.raises(ollama.ResponseError, match="NaN"):
            list(client.chat(model="stub", messages=HI, stream=True))
