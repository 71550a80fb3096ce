"""Ids of calls where a template takes nine letters and digits alone: ours, and those of histories from elsewhere."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from live_server import LiveServer
from tool_replies import TOOLS, saying

SHORT = re.compile("[A-Za-z0-9]{9}")
TEMPLATE = """{%- for m in messages %}
{%- for c in m.tool_calls or [] %}
{%- if not c.id is defined or c.id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}
{{- '[TOOL_CALLS]' ~ c.id ~ ' ' ~ c.function.name }}
{%- endfor %}
{%- if m.role == 'tool' %}
{%- if not m.tool_call_id is defined or m.tool_call_id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}
{{- '[TOOL_RESULTS]' ~ m.tool_call_id ~ ' ' }}{% endif %}
{{- m.content }}
{%- endfor %}"""
A, B = "call_0123456789abcdef", "toolu_01ABC"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    said = (
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "A"}}, {"name": "weather", "arguments": {"city": "B"}}]'
    )
    with saying(said, TEMPLATE) as server:
        yield server


def call(name: str | None, **more: Any) -> dict[str, Any]:
    made = {"type": "function", "function": {"name": "weather", "arguments": "{}"}, **more}
    return made if name is None else {"id": name, **made}


def chat(*ids: str | None, results: tuple[str | None, ...] | None = None) -> list[dict[str, Any]]:
    told = [{"role": "tool", "content": "r"} | ({} if i is None else {"tool_call_id": i}) for i in results or ids]
    return [{"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": [call(i) for i in ids]}, *told]  # fmt: skip


def shown(server: LiveServer, messages: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Ids of calls and of results as the template wrote them."""
    reply = server.post("/tokenize", {"messages": messages, "tools": TOOLS})
    assert reply.status_code == 200, reply.text
    text = server.post("/detokenize", {"tokens": reply.json()["tokens"]}).json()["prompt"]
    return re.findall(r"CALLS\](\w{9}) ", text), re.findall(r"RESULTS\](\w{9}) ", text)


def test_a_second_turn_of_ours_is_read_again(server: LiveServer) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "u"}], "tools": TOOLS, "max_tokens": 300}
    message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    ids = [each["id"] for each in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(map(SHORT.fullmatch, ids))
    results = [{"role": "tool", "content": "r", "tool_call_id": i} for i in ids]
    history = [*body["messages"], {k: message[k] for k in ("role", "content", "tool_calls")}, *results]
    assert server.post("/v1/chat/completions", {**body, "messages": history}).status_code == 200
    assert shown(server, history) == (ids, ids)


def test_foreign_ids_are_alike_in_call_and_result(server: LiveServer) -> None:
    calls, results = shown(server, chat(A, B, results=(B, A)))
    assert calls == results[::-1] and len(set(calls)) == 2
    again, _ = shown(server, [*chat(A, B), *chat("chatcmpl-tool-7", "abcdefgh9")])
    assert again[:2] == calls and again[3] == "abcdefgh9"
    calls, results = shown(server, chat(None, None, results=(None, None)))
    assert calls == results and len(set(calls)) == 2


def test_every_api_takes_its_own_ids(server: LiveServer) -> None:
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    use, result = ({"type": "tool_use", "id": B, "name": "weather", "input": {}},
                   {"type": "tool_result", "tool_use_id": B, "content": "r"})  # fmt: skip
    turns = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    items = [{"role": "user", "content": "u"},
             {"type": "function_call", "call_id": A, "name": "weather", "arguments": "{}"},
             {"type": "function_call_output", "call_id": A, "output": "r"}]  # fmt: skip
    ollama = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]},
        {"role": "tool", "content": "r", "tool_name": "weather"},
    ]
    model = server.service.names[0]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/messages", {"model": model, "messages": turns, "tools": [tool], "max_tokens": 300}),
        ("/v1/responses", {"input": items, "tools": [{"type": "function", **TOOLS[0]["function"]}]}),
        ("/api/chat", {"model": model, "messages": ollama, "tools": TOOLS, "stream": False}),
    ]
    for path, body in bodies:
        reply = server.post(path, body)
        assert reply.status_code == 200, reply.text
        ids = re.findall(r'"(?:call_)?id": ?"(\w{9})"', reply.text)
        assert len(ids) == 2, reply.text


def test_no_two_ids_of_a_conversation_become_one() -> None:
    from quire.text.messages.ids import ShortIds, short_id

    draw = random.Random(1)
    given = [f"call_{draw.getrandbits(64):x}" for _ in range(5000)]
    given += [short_id(given[0]), short_id(f"{given[0]} 1")]  # what the first would be, taken
    ids = ShortIds(given)
    made = [ids.of(name) for name in given]
    assert len(set(made)) == len(given) and all(map(SHORT.fullmatch, made))
    assert made[-2:] == given[-2:] and [ids.of(name) for name in given] == made
