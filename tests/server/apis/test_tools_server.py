"""Tools and reasoning over HTTP: a stub engine says scripted tokens, OpenAI's client reads the answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from live_server import LiveServer, text_tools
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Output
from quire.text.detokenizer import OutputText
from tool_replies import CALLS, SAID, THOUGHT, TOOLS, saying
from tool_replies import server as server

HI: list[Any] = [{"role": "user", "content": "hi"}]


def ask(server: LiveServer, **fields: Any) -> dict[str, Any]:
    return server.chat("hi", **{"tools": TOOLS, "max_tokens": 200, **fields})


def refused(server: LiveServer, **fields: Any) -> httpx.Response:
    reply = server.post("/v1/chat/completions", {"messages": HI, "max_tokens": 5, **fields})
    assert reply.status_code == 400, reply.text
    return reply


def test_openai_reads_a_whole_answer(server: LiveServer) -> None:
    reply = server.openai().chat.completions.create(model="stub", messages=HI, tools=TOOLS, max_tokens=200, n=2)
    for choice in reply.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert choice.message.model_extra == {"reasoning_content": "Hm."}
        calls = [c for c in choice.message.tool_calls or () if c.type == "function"]
        assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
            ("weather", {"city": "A"}),
            ("weather", {"city": "B"}),
        ]
    ids = [c.id for choice in reply.choices for c in choice.message.tool_calls or ()]
    assert len(set(ids)) == 4
    details = reply.usage and reply.usage.completion_tokens_details
    assert details
    one = len(server.tokenizer.encode("Hm.", add_special_tokens=False))
    assert 2 * one <= (details.reasoning_tokens or 0) < 2 * (len(server.tokenizer.encode(THOUGHT)) + 2)


def test_openai_reads_a_stream(server: LiveServer) -> None:
    with server.openai().chat.completions.stream(model="stub", messages=HI, tools=TOOLS, max_tokens=200) as stream:
        parts = [e.chunk.choices[0].delta.tool_calls for e in stream if e.type == "chunk" and e.chunk.choices]
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "Let me see."
    assert [c.function.arguments for c in final.message.tool_calls or ()] == ['{"city": "A"}', '{"city": "B"}']
    pieces = [part for found in parts for part in found or ()]
    assert len(pieces) > 4
    for index in range(2):
        first, *more = [p for p in pieces if p.index == index]
        assert (first.type, first.function and first.function.name) == ("function", "weather")
        assert (first.id or "").startswith("call_")
        assert all(p.id is None and p.function and p.function.name is None for p in more)


def test_a_stream_says_what_a_whole_answer_says(server: LiveServer) -> None:
    events, done = server.events("/v1/chat/completions", {"messages": HI, "tools": TOOLS, "max_tokens": 200})
    assert done
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Hm."
    assert "".join(d.get("content", "") for d in deltas) == "Let me see."
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_log_probabilities_are_those_of_the_content(server: LiveServer) -> None:
    found = ask(server, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in found).strip() == "Let me see."


def test_reasoning_can_be_left_out(server: LiveServer) -> None:
    reply = ask(server, include_reasoning=False)
    assert "reasoning_content" not in reply["choices"][0]["message"]
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_one_call_where_none_may_be_parallel(server: LiveServer) -> None:
    [call] = ask(server, parallel_tool_calls=False)["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "A"}'


def test_no_calls_without_tools(server: LiveServer) -> None:
    for fields in ({"tool_choice": "none"}, {"tools": None}):
        [choice] = ask(server, **fields)["choices"]
        assert choice["message"]["content"] == f"Let me see.{CALLS}"
        assert choice["finish_reason"] == "stop"
        assert "weather" not in server.tokenizer.decode(server.stub.submitted[-1].prompt)


def test_an_answer_cut_off_in_a_call(server: LiveServer) -> None:
    count = len(server.tokenizer.encode(SAID[: SAID.index("A") - 2], add_special_tokens=False))
    [choice] = ask(server, max_tokens=count)["choices"]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert '{"city": "A"}'.startswith(call["function"]["arguments"])


def test_history_reaches_the_template(server: LiveServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history.append({"role": "tool", "tool_call_id": "c1", "content": "sunny"})
    server.post("/v1/chat/completions", {"messages": history, "tools": TOOLS, "max_tokens": 1}).raise_for_status()
    prompt = server.tokenizer.decode(server.stub.submitted[-1].prompt, skip_special_tokens=False)
    assert prompt.startswith("<user>hi<assistant>[weather Rome]<tool>sunny#c1[{")
    assert '"name": "weather"' in prompt


def test_effort_is_a_switch_where_the_template_has_one(server: LiveServer) -> None:
    for fields in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        message = ask(server, **fields)["choices"][0]["message"]
        assert server.tokenizer.decode(server.stub.submitted[-1].prompt).endswith("<think></think>")
        assert message["content"].startswith("<think>")  # the prompt ends behind the reasoning: this is content
    assert refused(server, reasoning_effort="much").json()["error"]["param"] == "reasoning_effort"
    reply = refused(server, chat_template_kwargs={"thinking": True})
    assert "does not use it" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "web"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ([*TOOLS, *TOOLS], "tools[1].function.name"),
        ([{"type": "function", "function": {"name": "a", "parameters": 5}}], "tools[0].function.parameters"),
        (TOOLS * 129, "tools"),
    ],
)
def test_tools_that_are_none(server: LiveServer, tools: list[Any], param: str) -> None:
    assert refused(server, tools=tools).json()["error"]["param"] == param


def test_parsers_by_name_for_a_template_that_shows_none() -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with saying("[weather(city='A')]", plain, tool_call_parser="pythonic", reasoning_parser="qwen3") as server:
        [call] = ask(server)["choices"][0]["message"]["tool_calls"]
        assert call["function"]["arguments"] == '{"city": "A"}'
    with saying("a", plain) as server:
        assert "--tool-call-parser" in refused(server, tools=TOOLS).json()["error"]["message"]
    for options in ({"tool_call_parser": "x"}, {"reasoning_parser": "x"}, {"enable_auto_tool_choice": True}):
        with pytest.raises(ConfigError), saying("a", plain, **options):
            pass


def test_tools_that_the_template_does_not_show_are_told_of(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    path = "/v1/chat/completions"
    with saying("a", plain, tool_call_parser="pythonic", enable_auto_tool_choice=True) as hidden:
        assert "--enable-auto-tool-choice: the chat template of stub does not tell" in caplog.text
        for more, told in (
            ({"tools": TOOLS, "tool_choice": "auto"}, True),
            ({"tools": TOOLS}, True),
            ({"tools": TOOLS, "tool_choice": "none"}, False),
            ({}, False),
        ):
            warned = hidden.post(path, body | more).headers.get("warning", "")
            assert ("tools: the chat template does not tell the model of tools" in warned) == told, more
        both = hidden.post(path, body | {"tools": TOOLS, "colour": 1}).headers["warning"]
        assert "colour" in both and "tools: " in both
        assert "tools: " in hidden.post("/api/chat", {"model": "stub", "tools": TOOLS, **body}).headers["warning"]
    caplog.clear()
    assert "warning" not in server.post(path, body | {"tools": TOOLS}).headers
    with saying("a", enable_auto_tool_choice=True):
        assert "enable-auto-tool-choice" not in caplog.text


def test_special_tokens_that_are_markers_are_text() -> None:
    tokenizer, _ = text_tools()
    (first, a), (_, b) = list(tokenizer.special.items())[:2]
    word = tokenizer.encode("word", add_special_tokens=False)
    output = Output(request_id="r", tokens=[a, *word, b], finish_reason="length")
    assert OutputText(tokenizer, SamplingParams(), frozenset([a])).push(output).text == f"{first}word"
    assert OutputText(tokenizer, SamplingParams()).push(output).text == "word"


def test_a_template_is_told_anything_that_it_can_act_on() -> None:
    template = "{{ messages[0].content }}|{{ my_mode }}|{% for k in facts %}{{ k }}={{ facts[k] }};{% endfor %}"
    with saying("x", template) as server:
        ask(server, tools=None, chat_template_kwargs={"my_mode": "brief", "facts": {"a": 1, "b": [True, None]}})
        prompt = server.tokenizer.decode(server.stub.submitted[-1].prompt)
        assert prompt == "hi|brief|a=1;b=[True, None];"
        for name in ("messages", "tools", "tokenize", "chat_template", "add_generation_prompt", "image_mark", "self"):
            reply = refused(server, tools=None, chat_template_kwargs={name: "x"})
            assert reply.json()["error"]["param"] == f"chat_template_kwargs.{name}"
        assert "does not use it" in refused(server, tools=None, chat_template_kwargs={"nothing_such": 1}).text
