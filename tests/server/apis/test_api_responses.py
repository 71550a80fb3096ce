"""OpenAI's Responses API, by OpenAI's own client; what is remembered of responses, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from live_server import LiveServer, live, wait_until
from quire.server.apis.openai.responses import ResponseStore, Stored
from tool_replies import SAID, saying

TOOLS: Any = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with saying(SAID) as server:
        yield server


def asked(server: LiveServer, **fields: Any) -> Any:
    return server.openai().responses.create(**{"model": "stub", "input": "hi", "tools": TOOLS, **fields})


def prompt(server: LiveServer) -> str:
    return server.tokenizer.decode(server.stub.submitted[-1].prompt)


def test_a_response(server: LiveServer) -> None:
    reply = asked(server, instructions="Be short.", max_output_tokens=200)
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "function_call"]
    assert reply.output[0].content[0].text == "Hm." and reply.output_text == "Let me see."
    assert [item.arguments for item in reply.output[2:]] == ['{"city": "A"}', '{"city": "B"}']
    assert (reply.status, reply.incomplete_details, reply.error) == ("completed", None, None)
    assert reply.usage.input_tokens == len(server.stub.submitted[-1].prompt)
    assert 0 < reply.usage.output_tokens_details.reasoning_tokens < reply.usage.output_tokens
    assert prompt(server).startswith("<system>Be short.<user>hi")


def test_a_stream_ends_with_the_whole_response(server: LiveServer) -> None:
    with server.openai().responses.stream(model="stub", input="hi", tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    for kind, whole in (("output_text", "Let me see."), ("reasoning_text", "Hm.")):
        assert "".join(e.delta for e in events if e.type == f"response.{kind}.delta") == whole
        assert [e.text for e in events if e.type == f"response.{kind}.done"] == [whole]
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in final.output]
    assert final.output_text == "Let me see." and final.usage is not None


def test_log_probabilities_come_with_the_text(server: LiveServer) -> None:
    named: Any = ["message.output_text.logprobs"]
    whole = asked(server, include=named, top_logprobs=2).output[1].content[0]
    events = list(asked(server, include=named, top_logprobs=2, stream=True))
    assert whole.logprobs and all(len(entry.top_logprobs) == 2 for entry in whole.logprobs)
    parts = [entry.token for e in events if e.type == "response.output_text.delta" for entry in e.logprobs]
    assert parts == [entry.token for entry in whole.logprobs]


def test_what_was_cut_off_is_incomplete(server: LiveServer) -> None:
    reply = asked(server, max_output_tokens=3)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert list(asked(server, max_output_tokens=3, stream=True))[-1].type == "response.incomplete"


def test_a_conversation_goes_on_by_id(server: LiveServer) -> None:
    first = asked(server)
    output: Any = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "sunny"}
    second = asked(server, input=[output], previous_response_id=first.id)
    told = prompt(server)
    assert told.startswith(f"<user>hi<assistant>Let me see.[weather A][weather B]<tool>sunny#{first.output[2].call_id}")
    asked(server, input="and?", previous_response_id=second.id)
    assert prompt(server).startswith(told[: told.index("[{")])
    items: Any = [{"role": "user", "content": "hi"}, *[item.model_dump() for item in first.output], output]
    asked(server, input=items)
    assert prompt(server) == told, "the same when the client sends all of it"


def test_stored_responses_are_read_and_forgotten(server: LiveServer) -> None:
    client, made = server.openai(), asked(server)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        asked(server, previous_response_id=made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(asked(server, store=False).id)


def test_in_the_background() -> None:
    with live(api_key=("a", "b")) as server:
        client, other = server.openai("a"), server.openai("b")
        server.stub.paused = True
        ask: Any = {"model": "stub", "input": "hi", "max_output_tokens": 5, "background": True}
        first, second = client.responses.create(**ask), client.responses.create(**ask)
        assert first.status == "in_progress" and client.responses.retrieve(first.id).status == "in_progress"
        with pytest.raises(openai.NotFoundError):
            other.responses.cancel(first.id)
        assert client.responses.cancel(second.id).status == "cancelled"
        server.stub.paused = False
        wait_until(lambda: client.responses.retrieve(first.id).status != "in_progress")
        assert client.responses.retrieve(first.id).usage.output_tokens == 5  # type: ignore[union-attr]
        assert client.responses.retrieve(second.id).status == "cancelled"
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(first.id)
        server.stub.poison = 2
        third = client.responses.create(**ask)
        wait_until(lambda: client.responses.retrieve(third.id).status == "failed")
        assert "NaN" in (client.responses.retrieve(third.id).error or third).message  # type: ignore[union-attr]
        wait_until(lambda: server.state.active == 0)


def test_a_failure_in_a_stream_is_a_failed_response() -> None:
    with live() as server:
        server.stub.poison = 3
        last = list(server.openai().responses.create(model="stub", input="hi", stream=True))[-1]
        assert last.type == "response.failed" and last.response.error and "NaN" in last.response.error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "wizard", "content": "a"}]}, "input[0].role"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "x"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "store"),
    ],
    ids=str,
)
def test_what_is_refused(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    reply = server.post("/v1/responses", {"model": "stub", "input": "hi", "tools": TOOLS, **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param and error["message"].startswith(f"{param}:")


def test_what_changes_nothing_is_named(server: LiveServer) -> None:
    body = {"input": "hi", "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"},
            "service_tier": "auto"}  # fmt: skip
    told = server.post("/v1/responses", body).headers["warning"]
    assert all(name in told for name in ("include[0]", "reasoning.summary", "service_tier"))


def test_the_store_is_bounded() -> None:
    store = ResponseStore(count=3, tenant_bytes=100, total=90)
    for i in range(5):
        assert store.put("a", str(i), Stored(b"r" * 10, b"i" * 10))
    assert [store.get("a", str(i)) is not None for i in range(5)] == [False, False, True, True, True]
    assert not store.put("a", "big", Stored(b"", b"x" * 91)) and store.get("a", "4")
    assert store.get("b", "4") is None and not store.drop("b", "4")
    assert store.put("b", "x", Stored(b"x" * 40, b"")), "the one who has most makes room"
    assert store.get("a", "4") and not store.get("a", "2") and store.get("b", "x")
