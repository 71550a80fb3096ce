"""Anthropic's API, by Anthropic's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from live_server import LiveServer, live
from tool_replies import SAID, saying

anthropic = pytest.importorskip("anthropic", reason="the extra 'clients' is not installed")
HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with saying(SAID) as server:
        yield server


def client(server: LiveServer, key: str = "none") -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=10.0)


def test_a_message(server: LiveServer) -> None:
    reply = client(server).messages.create(model="stub", max_tokens=200, messages=HI, tools=TOOLS, system="Be short.")
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert reply.content[0].thinking == "Hm." and reply.content[1].text == "Let me see."
    assert [block.input for block in reply.content[2:]] == [{"city": "A"}, {"city": "B"}]
    assert reply.content[2].id != reply.content[3].id
    assert (reply.stop_reason, reply.role, reply.model) == ("tool_use", "assistant", "stub")
    usage = reply.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(server.stub.submitted[-1].prompt)
    assert usage.output_tokens > 20
    assert server.tokenizer.decode(server.stub.submitted[-1].prompt).startswith("<system>Be short.")


def test_a_stream_says_what_a_whole_message_says(server: LiveServer) -> None:
    asked: dict[str, Any] = {"model": "stub", "max_tokens": 200, "messages": HI, "tools": TOOLS}
    whole = client(server).messages.create(**asked)
    with client(server).messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert kinds.count("input_json") > 2

    def plain(message: Any) -> Any:
        blocks = [{k: v for k, v in b.model_dump().items() if k != "id"} for b in message.content]
        return blocks, message.stop_reason, message.usage.input_tokens, message.usage.output_tokens

    strip = [b | {"parsed_output": None} for b in plain(whole)[0]]
    assert [b | {"parsed_output": None} for b in plain(final)[0]] == strip and plain(final)[1:] == plain(whole)[1:]


def test_why_it_ended(server: LiveServer) -> None:
    ask = client(server).messages.create
    cut = ask(model="stub", max_tokens=3, messages=HI)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3
    stopped = ask(model="stub", max_tokens=50, messages=HI, stop_sequences=["me see"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "me see")
    assert ask(model="stub", max_tokens=200, messages=HI).stop_reason == "end_turn"


def test_history_and_tool_results_reach_the_template(server: LiveServer) -> None:
    used = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]}
    history = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "Hm"}, used]}]
    history.append({"role": "user", "content": [result, {"type": "text", "text": "and?"}]})
    client(server).messages.create(model="stub", max_tokens=1, messages=history, tools=TOOLS, metadata={"user_id": "u"})
    request = server.stub.submitted[-1]
    prompt = server.tokenizer.decode(request.prompt)
    assert prompt.startswith("<user>hi<assistant>Hm[weather Rome]<tool>sunny#t1<user>and?") and request.tenant == "u"
    count = client(server).messages.count_tokens(model="stub", messages=history, tools=TOOLS)
    assert count.input_tokens == len(request.prompt)


def test_an_answer_that_is_begun_goes_on(server: LiveServer) -> None:
    client(server).messages.create(model="stub", max_tokens=1, messages=[*HI, {"role": "assistant", "content": "So"}])
    assert server.tokenizer.decode(server.stub.submitted[-1].prompt).endswith("<assistant>So")


def test_thinking_is_a_switch(server: LiveServer) -> None:
    ask = client(server).messages.create
    ask(model="stub", max_tokens=9, messages=HI, thinking={"type": "disabled"})
    assert server.tokenizer.decode(server.stub.submitted[-1].prompt).endswith("<think></think>")
    ask(model="stub", max_tokens=9, messages=HI, thinking={"type": "enabled", "budget_tokens": 1024})
    assert not server.tokenizer.decode(server.stub.submitted[-1].prompt).endswith("<think></think>")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source.type",
        ),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        ({"output_config": {"format": {"type": "x"}}}, "output_config.format.type"),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
    ids=str,
)
def test_what_is_refused(server: LiveServer, fields: dict[str, Any], named: str) -> None:
    reply = server.post("/v1/messages", {"model": "stub", "max_tokens": 5, "messages": HI, **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith(f"{named}:")


def test_errors_have_the_clients_classes(server: LiveServer) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client(server).messages.create(model="claude", max_tokens=5, messages=HI)
    with live(api_key=("k",)) as locked:
        with pytest.raises(anthropic.AuthenticationError):
            client(locked, "wrong").messages.create(model="stub", max_tokens=5, messages=HI)
        assert client(locked, "k").messages.create(model="stub", max_tokens=5, messages=HI).usage.output_tokens == 5


def test_a_failure_in_a_stream_is_an_error_event() -> None:
    with saying("word " * 30) as server:
        server.stub.poison = 4
        with pytest.raises(anthropic.APIStatusError, match="api_error"):
            list(client(server).messages.create(model="stub", max_tokens=20, messages=HI, stream=True))
