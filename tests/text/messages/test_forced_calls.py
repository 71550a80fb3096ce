"""Calls that must be made, answers in whose place they may come, reasoning before both: always whole and valid."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest

from live_server import LiveServer
from oracle import BACKENDS
from quire.core.errors import BadRequest
from quire.core.structured import StructuredOutputsParams
from quire.server.server_options import ServerOptions
from quire.server.text_generation.output_parsing import formats_of
from quire.text.messages.formats import REASONING, TOOLS
from quire.text.messages.message_grammar import MessageGrammar
from quire.text.messages.parser import Parser
from quire.text.messages.text_source import MessageDelta, ParserRequest
from quire.text.structured.grammar_reader import READER
from quire.text.structured.guide import Grammar, GrammarGuide
from quire.text.structured.vocabulary import Vocabulary, vocabulary_of
from quire.text.tokenizer import Tokenizer
from real_server import real
from shaped import PERSON, PYDOC, VOCAB
from structured_requests import END, wander

needs_native = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 12},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit", ""]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "plot": {
        "type": "object",
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
        "properties": {
            "title": {"type": ["string", "null"]},
            "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": 3},
            "log": {"type": "boolean"},
        },
        "required": ["points", "log"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
ASKED: list[Any] = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
Words = tuple[Tokenizer, Vocabulary]


@cache
def marked(folder: Path) -> Tokenizer:
    """The embedded model's tokenizer with all markers as special tokens of it."""
    made = json.loads((PYDOC / "tokenizer.json").read_text())
    markers = {*(m for row in TOOLS.values() for m in row.markers), *REASONING["qwen3"].openers, "</think>"}
    for i, marker in enumerate(sorted(markers)):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        made["added_tokens"].append({"id": VOCAB + i, "content": marker, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(made))
    (folder / "tokenizer_config.json").write_text((PYDOC / "tokenizer_config.json").read_text())
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module", params=["text", "tokens"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Words:
    """One in which markers are text, and one in which they are tokens."""
    if request.param == "text":
        tokenizer = Tokenizer.from_folder(PYDOC)
        return tokenizer, vocabulary_of(tokenizer, VOCAB)
    tokenizer = marked(tmp_path_factory.mktemp("marked"))
    return tokenizer, vocabulary_of(tokenizer, VOCAB + 64)


def said(grammar: str, more: int, seed: int, vocabulary: Words, shape: Any = None) -> str:
    """What a model that knows nothing says of it, in `more` tokens than it takes; of `shape` it is the frame."""
    tokenizer, known = vocabulary
    asked = StructuredOutputsParams(**(shape or {"grammar": grammar}))
    read = READER.read(asked, (END,), known, grammar if shape else "")
    most = len(read.completion) + more
    guide = GrammarGuide(Grammar(read.grammar, known), most, (END,), read.completion)
    tokens = wander(guide, most, np.random.default_rng(seed), known.size)
    assert len(tokens) <= most
    return tokenizer.decode(tokens, skip_special_tokens=False)


def read(row: str, reasoning: str | None, inside: bool | None, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, reasoning and calls of it."""
    reading = ParserRequest(lambda: "id", SCHEMAS, inside)
    parser = Parser(REASONING[reasoning] if reasoning else None, TOOLS[row], reading)
    deltas: list[MessageDelta] = parser.push(text) + parser.end()
    calls = [(d.name, "".join(e.text for e in deltas if e.kind == "arguments" and e.index == d.index))
             for d in deltas if d.kind == "call"]  # fmt: skip
    content, thought = ("".join(d.text for d in deltas if d.kind == kind) for kind in ("content", "reasoning"))
    return content, thought, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", TOOLS)
def test_forced_calls_are_whole_and_valid(name: str, vocabulary: Words) -> None:
    draw = random.Random(name)
    for seed in range(4):
        reasoning, inside = draw.choice([(None, None), ("qwen3", None), ("deepseek_r1", True), ("granite", True)])
        if name == "openai":
            reasoning, inside = "openai", None
        written = MessageGrammar(TOOLS[name], REASONING.get(reasoning or ""), inside, set(vocabulary[0].special))
        choice, parallel = draw.choice([None, *SCHEMAS]), draw.random() < 0.5
        text = said(written.forced(ASKED, choice, parallel), draw.choice((0, 1, 2, 5, 40)), seed, vocabulary)
        content, _, calls = read(name, reasoning, inside, text)
        assert not content and calls, text
        assert parallel or len(calls) == 1
        for called, arguments in calls:
            assert choice in (None, called)
            jsonschema.validate(arguments, SCHEMAS[called])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", TOOLS)
def test_answers_in_whose_place_calls_may_come(name: str, vocabulary: Words) -> None:
    reasoning = "openai" if name == "openai" else None
    written = MessageGrammar(TOOLS[name], REASONING.get(reasoning or ""), None, set(vocabulary[0].special))
    kinds = set()
    for seed in range(4):
        text = said(written.around(ASKED, False), 20, seed, vocabulary, {"json": PERSON})
        content, _, calls = read(name, reasoning, None, text)
        kinds.add(bool(calls))
        if calls:
            jsonschema.validate(calls[0][1], SCHEMAS[calls[0][0]])
        else:
            jsonschema.validate(json.loads(content), PERSON)
        text = said(written.free(ASKED, False), 60, seed, vocabulary)
        for called, arguments in read(name, reasoning, None, text)[2]:
            jsonschema.validate(arguments, SCHEMAS[called])
    assert kinds


@pytest.mark.parametrize(("reasoning", "inside"), [("qwen3", None), ("deepseek_r1", True), ("glm4", False)])
def test_reasoning_before_an_answer_ends_in_time(reasoning: str, inside: bool | None, vocabulary: Words) -> None:
    written = MessageGrammar(None, REASONING[reasoning], inside, set(vocabulary[0].special))
    thoughts = 0
    for seed in range(8):
        frame = written.around([], True)
        assert (frame == "") == (inside is False)
        text = said(frame, seed * 3, seed, vocabulary, {"json": PERSON})
        content, thought, _ = read("hermes", reasoning, inside, text)
        jsonschema.validate(json.loads(content), PERSON)
        thoughts += bool(thought)
    assert thoughts or not inside


NOT_FORCED = [
    ("glm4", {"properties": {"a": {"type": "string", "pattern": "^a"}}}, "tools[0].function.parameters.properties.a"),
    ("glm4", {"properties": {"a b": {"type": "integer"}}}, "tools[0].function.parameters.properties.a b"),
    ("pythonic", {"properties": {"a-b!": {"type": "integer"}}}, "tools[0].function.parameters.properties.a-b!"),
    ("qwen3_coder", {"minProperties": 1}, "tools[0].function.parameters.minProperties"),
    ("hermes", {"type": "array"}, "tools[0].function.parameters.type"),
]


@pytest.mark.parametrize(("name", "schema", "param"), NOT_FORCED, ids=[row[2] for row in NOT_FORCED])
def test_what_a_format_cannot_say_is_refused_with_its_place(name: str, schema: dict[str, Any], param: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(BadRequest) as caught:
        MessageGrammar(TOOLS[name], None, None, ()).forced([tool], None, True)
    assert caught.value.param == param


# ------------------------------------------------------------------------------------------------------------ over HTTP


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with real(max_model_len=512) as server:
        yield server


def ask(server: LiveServer, name: str, **fields: Any) -> httpx.Response:
    """Of a server whose model speaks the format `name`."""
    options = ServerOptions(tool_call_parser=name, reasoning_parser="openai" if name == "openai" else None)
    server.service.formats = formats_of(options, None, server.tokenizer)
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": ASKED, "temperature": 1.5, **fields}
    return server.post("/v1/chat/completions", body)


def shortest(server: LiveServer, name: str, **fields: Any) -> int:
    """Tokens that are needed, as the refusal of too few says."""
    reply = ask(server, name, max_tokens=1, **fields)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "max_tokens"
    return int(reply.json()["error"]["message"].rpartition("; ")[2].split()[0])


def check(choice: dict[str, Any], named: str | None, parallel: bool) -> None:
    message = choice["message"]
    assert not message["content"] and message["tool_calls"]
    assert parallel or len(message["tool_calls"]) == 1
    for call in message["tool_calls"]:
        called = call["function"]["name"]
        assert named in (None, called)
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[called])
    assert choice["finish_reason"] in ("stop" if named else "tool_calls", "length")


@pytest.mark.sampled(5)
@needs_native
@pytest.mark.parametrize("name", TOOLS)
def test_required_and_named_calls_over_http(server: LiveServer, name: str) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for choice, parallel in (("required", False), (named, True)):
        fields: dict[str, Any] = {"tool_choice": choice, "parallel_tool_calls": parallel, "n": 2, "seed": 1}
        most = shortest(server, name, **fields) + (6 if parallel else 0)
        whole = ask(server, name, max_tokens=most, logprobs=True, **fields)
        assert whole.status_code == 200, whole.text
        for each in whole.json()["choices"]:
            check(each, None if choice == "required" else "get_weather", parallel)
        found = stream(server, name, fields | {"max_tokens": most})
        for each in whole.json()["choices"]:
            made = [call["function"] for call in each["message"]["tool_calls"]]
            calls = [(call["name"], call["arguments"]) for call in made]
            assert found[each["index"]] == (calls, each["finish_reason"])


def stream(server: LiveServer, name: str, fields: dict[str, Any]) -> dict[int, tuple[list[tuple[str, str]], str]]:
    """Calls and the reason to end of each choice."""
    reply = ask(server, name, stream=True, **fields)
    events = [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: {")]
    calls: dict[int, list[list[str]]] = {0: [], 1: []}
    ended: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        for part in choice["delta"].get("tool_calls", ()):
            if part.get("id"):
                calls[choice["index"]].append([part["function"]["name"], ""])
            calls[choice["index"]][part["index"]][1] += part["function"]["arguments"]
        ended[choice["index"]] = choice["finish_reason"] or ended.get(choice["index"], "")
    return {i: ([(n, a) for n, a in found], ended[i]) for i, found in calls.items()}


@needs_native
def test_an_answer_of_a_shape_or_a_strict_call(server: LiveServer) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    for seed in range(4):
        [choice] = ask(server, "hermes", response_format=shape, max_tokens=60, seed=seed).json()["choices"]
        if "tool_calls" in choice["message"]:
            check(choice, None, True)
        else:
            jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in ASKED]
    reply = ask(server, "hermes", tools=strict, max_tokens=40, seed=1)
    assert reply.status_code == 200 and server.service.engine.metrics is not None


@needs_native
def test_an_answer_of_a_shape_behind_reasoning(server: LiveServer) -> None:
    server.service.formats = formats_of(ServerOptions(reasoning_parser="deepseek_r1"), None, server.tokenizer)
    body = {"messages": [{"role": "user", "content": "hi"}], "guided_json": PERSON, "temperature": 1.5}
    for seed in range(4):
        reply = server.post("/v1/chat/completions", {**body, "max_tokens": 30 + 9 * seed, "seed": seed}).json()
        message, usage = reply["choices"][0]["message"], reply["usage"]
        jsonschema.validate(json.loads(message["content"]), PERSON)
        assert message["reasoning_content"]
        assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"] <= 30 + 9 * seed


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "some"}, "tool_choice", "must be"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "must be"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "none of tools"),
    ({"tool_choice": "required", "tools": None}, "tool_choice", "no tools"),
    ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice", "another shape"),
    ({"tool_choice": "required", "stop": "a"}, "stop", "grammar"),
    ({"tool_choice": "required", "min_tokens": 2}, "min_tokens", "grammar"),
    ({"tool_choice": "required", "max_completion_tokens": 3}, "max_completion_tokens", "are needed"),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}}}]}, "tools",
        "tool 'f', property 'a': no value"),
    ({"response_format": {"type": "json_object"}, "tools": [{"type": "function", "function": {
        "name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}]}, "tools",
        "tool 'f', property 'a': Invalid type"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict", "true"),
]  # fmt: skip


@needs_native
@pytest.mark.parametrize(("fields", "param", "says"), REFUSED, ids=[f"{row[1]} {row[2]}" for row in REFUSED])
def test_what_cannot_be_forced_is_refused(server: LiveServer, fields: dict[str, Any], param: str, says: str) -> None:
    reply = ask(server, "hermes", **{"max_tokens": None if "max_completion_tokens" in fields else 90, **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param and says in error["message"]
