"""What a grammar cannot hold of a JSON schema is checked when an answer is whole, and every API says where it fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from live_server import LiveServer
from oracle import BACKENDS
from quire import LLM, SamplingParams
from quire.core.structured import StructuredOutputsParams
from quire.server.server_options import ServerOptions
from quire.server.text_generation.output_parsing import formats_of
from real_server import real

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
TWICE = {"type": "array", "items": {"type": "integer", "minimum": 7, "maximum": 7}, "uniqueItems": True, "minItems": 2,
         "maxItems": 2}  # fmt: skip
"""All that a grammar lets be said of it is wrong."""
ASK = [{"role": "user", "content": "hi"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "t", "schema": TWICE}}
FIELD = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": TWICE}, "required": ["b"]}},
         "required": ["a"], "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": FIELD}}
FORCED = {"messages": ASK, "tools": [TOOL], "tool_choice": "required", "max_tokens": 90, "parallel_tool_calls": False}
ANTHROPIC = {"model": "pydoc", "messages": ASK, "max_tokens": 30,
             "output_config": {"format": {"type": "json_schema", "schema": TWICE}}}  # fmt: skip
OLLAMA = {"model": "pydoc", "format": TWICE, "options": {"num_predict": 30}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": ASK, "response_format": FORMAT, "max_tokens": 30}),
    ("/v1/chat/completions", FORCED),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": TWICE}, "max_tokens": 30}),
    ("/v1/completions", {"prompt": "a", "guided_json": json.dumps(TWICE), "max_tokens": 30}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "t", "schema": TWICE}}}),
    ("/v1/messages", ANTHROPIC),
    ("/api/chat", {**OLLAMA, "messages": ASK}),
    ("/api/generate", {**OLLAMA, "prompt": "a"}),
    ("/generate", {"inputs": "a", "parameters": {"grammar": {"type": "json", "value": TWICE}, "max_new_tokens": 30}}),
    ("/completion", {"prompt": "a", "json_schema": TWICE, "n_predict": 30}),
]
IDS = [f"{path} {' '.join(body)[-20:]}" for path, body in ASKED]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with real(max_model_len=512) as server:
        server.service.formats = formats_of(ServerOptions(), None, server.tokenizer)
        yield server


def found_in(reply: httpx.Response) -> list[dict[str, Any]]:
    """The errors that a reply or the events of a stream tell."""
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines()] if "\n" in reply.text else [reply.text]
    told = [json.loads(line) for line in lines if line.startswith("{")]
    told += [each["response"] for each in told if isinstance(each.get("response"), dict)]
    return [error for each in told for error in each.get("quire", {}).get("schema_errors", ())]


@pytest.mark.parametrize(("path", "body"), ASKED, ids=IDS)
def test_a_reply_says_what_its_schema_does_not_allow(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    [error] = found_in(server.post(path, {**body, "stream": False} if path != "/generate" else body))
    assert "there twice" in error["message"]
    if "tools" in body:
        assert (error["tool"], error["path"]) == ("f", "/a/b")


@pytest.mark.parametrize(("path", "body"), ASKED, ids=IDS)
def test_a_stream_says_it_at_its_end(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    path, more = ("/generate_stream", {}) if path == "/generate" else (path, {"stream": True})
    [error] = found_in(server.post(path, {**body, **more}))
    assert "there twice" in error["message"]


def test_choices_are_told_apart_and_counted(server: LiveServer) -> None:
    schema = {"type": "array", "items": {"type": "integer", "minimum": 6, "maximum": 7}, "uniqueItems": True,
              "minItems": 2, "maxItems": 2}  # fmt: skip
    body = {
        "prompt": "a",
        "structured_outputs": {"json": schema},
        "max_tokens": 30,
        "n": 8,
        "temperature": 1.5,
        "seed": 3,
    }
    reply = server.post("/v1/completions", body)
    wrong = [c["index"] for c in reply.json()["choices"] if len(set(json.loads(c["text"]))) < 2]
    assert 0 < len(wrong) < 8
    assert sorted(error.get("choice", 0) for error in found_in(reply)) == wrong
    metrics = server.http.get("/metrics").text
    assert "quire:answers_with_schema_errors_total" in metrics
    assert found_in(server.post("/v1/completions", {**body, "structured_outputs": {"json": {"type": "array"}}})) == []


def test_strict_of_response_format_refuses_and_of_tools_does_not(server: LiveServer) -> None:
    strict = {"type": "json_schema", "json_schema": {"name": "t", "strict": True, "schema": FIELD}}
    error = server.post("/v1/chat/completions", {"messages": ASK, "response_format": strict}).json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert "property 'a.b': uniqueItems" in error["message"] and "strict" in error["message"]
    tool = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    assert found_in(server.post("/v1/chat/completions", {**FORCED, "tools": [tool]}))


SCHEMA = {"type": "object", "properties": {"city": {"enum": ["A", "B"]}}, "required": ["city"],
          "additionalProperties": False}  # fmt: skip
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_calls_are_forced_of_a_model_without_a_format(server: LiveServer, choice: Any, stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "map")]
    body = {
        "messages": ASK,
        "tools": tools,
        "tool_choice": choice,
        "max_tokens": 120,
        "temperature": 1.5,
        "stream": stream,
    }
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    if not stream:
        [told] = reply.json()["choices"]
        calls = told["message"]["tool_calls"]
        assert told["message"]["content"] is None
    else:
        chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        assert all("choices" in c for c in chunks), reply.text
        parts = [part for c in chunks for e in c["choices"] for part in e["delta"].get("tool_calls", ())]
        assert not any(e["delta"].get("content") for c in chunks for e in c["choices"])
        arguments = "".join(part["function"]["arguments"] for part in parts if part["index"] == 0)
        calls = [{**parts[0], "function": {"name": parts[0]["function"]["name"], "arguments": arguments}}]
    assert calls
    for call in calls:
        assert call["function"]["name"] in ("weather",) if choice == NAMED else ("weather", "map")
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_calls_are_forced_over_other_apis(server: LiveServer) -> None:
    tool = {"name": "weather", "input_schema": SCHEMA}
    body = {"model": "pydoc", "messages": ASK, "max_tokens": 90, "tools": [tool], "tool_choice": {"type": "any"}}
    [block] = server.post("/v1/messages", {**body, "tool_choice": {"type": "tool", "name": "weather",
                                           "disable_parallel_tool_use": True}}).json()["content"]  # fmt: skip
    assert block["type"] == "tool_use" and block["input"]["city"] in "AB"
    asked = {"input": "a", "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]}
    reply = server.post("/v1/responses", {**asked, "tool_choice": "required", "parallel_tool_calls": False}).json()
    assert [item["type"] for item in reply["output"]] == ["function_call"]
    refused = server.post("/v1/responses", asked)
    assert refused.status_code == 400 and "--tool-call-parser" in refused.json()["error"]["message"]


def test_llm_says_it_too() -> None:
    with LLM(max_model_len=256) as llm:
        shape = StructuredOutputsParams(json=TWICE)
        [output] = llm.generate("a", SamplingParams(structured_outputs=shape, max_tokens=20), use_tqdm=False)[0].outputs
    assert output.text.count("7") == 2
    assert [error.message for error in output.schema_errors] == ["7 is there twice"]
