"""Everything the HTTP edge refuses: the status, the field it names, and that the engine never saw the request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import pytest

from live_server import LiveServer, live
from quire.server.apis.openai.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeText
from quire.server.pages import live_pages, pages, reference_pages
from shaped import SHAPELESS

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live(strict=True) as server:
        yield server


SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 1000}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**12}, "n"),
    ({"n": [1]}, "n"),
    ({"best_of": 300}, "best_of"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": ["a" * 1025]}, "stop"),
    ({"stop_token_ids": [6144]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["4"]}, "stop_token_ids[0]"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["a"] * 257}, "bad_words"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"all": True}}, "stream_options.all"),
    ({"priority": 1}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"request_id": "a" * 257}, "request_id"),
    ({"model": 5}, "model"),
    *SHAPELESS,
    ({"use_beam_search": True, "n": 30}, "n"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"logits_processors": ["os.system"]}, "logits_processors"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"temprature": 1}, "temprature"),
]
COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [5, [6]]}, "prompt"),
    ({"prompt": [6144]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [5] * 256}, "prompt"),
    ({"prompt": "word " * 400}, "prompt"),
    ({"prompt": ["a"] * 201}, "prompt"),
    ({"prompt": ["a"] * 150, "n": 2}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"suffix": "end"}, "suffix"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"echo": 1}, "echo"),
    ({"messages": HI}, "messages"),
    ({"tools": []}, "tools"),
]
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x"),
    ({"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
     "messages[0].content[0].image_url.url"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]},
     "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "user", "content": "word " * 400}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 1000}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"verbosity": "low"}, "verbosity"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "a"}}, "audio"),
    ({"prediction": {"type": "content"}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"echo": True}, "echo"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"documents": [{"text": "a"}]}, "documents"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"enable_thinking": [1]}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"image_mark": "x"}}, "chat_template_kwargs.image_mark"),
    ({"chat_template_kwargs": {"a": "b" * 17_000}}, "chat_template_kwargs"),
    ({"prompt": "a"}, "prompt"),
]  # fmt: skip
CASES = (
    [("/v1/completions", {"prompt": "hi"}, *case) for case in SAMPLING + COMPLETION]
    + [("/v1/chat/completions", {"messages": HI}, *case) for case in SAMPLING + CHAT]
    + [
        ("/tokenize", {"prompt": "a"}, {"prompt": 5}, "prompt"),
        ("/tokenize", {}, {}, "prompt"),
        ("/tokenize", {"prompt": "a"}, {"x": 5}, "x"),
        ("/tokenize", {"messages": HI}, {"tools": [1]}, "tools[0]"),
        ("/detokenize", {"tokens": [1]}, {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1]}, {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1]}, {"tokens": [6144]}, "tokens"),
    ]
)


@pytest.mark.parametrize(("path", "base", "change", "param"), CASES, ids=lambda v: str(v)[:60])
def test_a_bad_field_is_a_400_that_names_it(
    server: LiveServer, path: str, base: dict[str, Any], change: dict[str, Any], param: str
) -> None:
    reply = server.post(path, base | change)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert server.stub.submitted == []


def test_messages_carry_the_numbers(server: LiveServer) -> None:
    error = server.post("/v1/completions", {"prompt": [5] * 10, "max_tokens": 247}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    for number in ("10 prompt tokens", "247", "257", "256", "246"):
        assert number in error["message"]


RAW: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b"nonsense", "not valid JSON"),
    (b"[]", "object"),
    (b'{"prompt": "a"', "not valid JSON"),
    (b'{"prompt": "a"} trailing', "not valid JSON"),
    (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
    (b'{"prompt": "a", "temperature": Infinity}', "not valid JSON"),
    (b'{"prompt": "a", "temperature": 1e400}', "temperature"),
    (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "more digits"),
    (b'{"prompt": "a", "metadata": ' + b"9" * 5000 + b"}", "more digits"),
    (b'{"prompt": "a", "prompt": "b"}', "prompt: the field is given twice"),
    (b'{"prompt": "a", "metadata": {"k": 1, "k": 2}}', "k: the field is given twice"),
    (b'{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}', "5: the field is given twice"),
    (b'{"prompt": "a", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "prompt"),
    (b'{"prompt": "\xff"}', "not valid JSON"),
    (b'{"prompt": "\\ud800"}', "not valid JSON"),
    (b'{"prompt": "a", "\\udc00": 1}', "not valid JSON"),
    (b'{"prompt": "a", "user": ["\\ud83d"]}', "not valid JSON"),
    (b'{"prompt": "a", "logit_bias": {"5.0": 1}}', "logit_bias"),
    (b'{"prompt": "a\x00"}', "not valid JSON"),
    (b"\xef\xbb\xbf" + b'{"prompt": "a"}', "not valid JSON"),
    (json.dumps({"prompt": "a"}).encode("utf-16"), "not valid JSON"),
]


@pytest.mark.parametrize(("body", "says"), RAW, ids=lambda v: str(v)[:50])
def test_bad_json_is_a_400(server: LiveServer, body: bytes, says: str) -> None:
    reply = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert says in reply.json()["error"]["message"]
    assert server.stub.submitted == []


ACCEPTED: list[dict[str, Any]] = [
    {"user": "me", "metadata": {"a": 1}, "store": True, "service_tier": "auto", "parallel_tool_calls": True},
    {"prompt_cache_key": "a", "safety_identifier": "b", "response_format": {"type": "text"}},
    {"best_of": 1, "n": 1, "use_beam_search": False, "length_penalty": 1.0, "guided_json": None},
    {"temperature": 0, "top_k": -1, "logit_bias": {}, "stop": [], "stop_token_ids": [], "bad_words": []},
    {"priority": 0, "seed": -5},
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_what_asks_for_nothing_is_accepted(fields: dict[str, Any]) -> None:
    with live() as server:
        server.complete("a", max_tokens=1, **fields)
        server.chat("a", max_tokens=1, tools=[], tool_choice="auto", modalities=["text"], **fields)


def test_priority_is_accepted_where_it_works() -> None:
    with live(scheduling_policy="priority") as server:
        server.complete("a", max_tokens=1, priority=-3)
        assert server.stub.submitted[0].priority == -3
        assert server.post("/v1/completions", {"prompt": "a", "priority": 2**31}).status_code == 400


def test_models_routes_and_methods(server: LiveServer) -> None:
    for reply in (
        server.post("/v1/completions", {"prompt": "a", "model": "other"}),
        server.post("/v1/chat/completions", {"messages": HI, "model": "other"}),
        server.http.get("/v1/models/other"),
    ):
        assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
    unknown = server.http.get("/v1/nothing")
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "not_found"
    wrong = server.http.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert server.http.head("/health").status_code == 200 and server.http.head("/v1/completions").status_code == 405
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert server.http.request(method, "/v1/chat/completions").status_code == 405


def test_content_type_encoding_and_size(server: LiveServer) -> None:
    json_type = {"content-type": "application/json"}

    def post(content: Any, headers: dict[str, str]) -> int:
        return server.http.post("/v1/completions", content=content, headers=headers).status_code

    body = b'{"prompt": "a", "max_tokens": 1}'
    assert post(body, {"content-type": "text/plain"}) == 415
    assert post(body, {}) == 415
    assert post(body, json_type | {"content-encoding": "gzip"}) == 415
    assert post(body, {"content-type": "application/json; charset=utf-8", "content-encoding": "identity"}) == 200
    server.stub.submitted.clear()
    big = b'{"prompt": "' + b"a" * (8 << 20) + b'"}'
    assert post(big, json_type) == 413
    assert post((big[i : i + 65536] for i in range(0, len(big), 65536)), json_type) == 413
    assert server.stub.submitted == []


def test_hosts_and_keys() -> None:
    """With every route and method without a key (T25)."""
    with live() as server:
        assert server.http.get("/version", headers={"host": "evil.example"}).status_code == 421
        assert server.http.get("/version", headers={"host": "LOCALHOST:8000"}).status_code == 200
    with live(api_key=("secret", "other"), allowed_hosts=("api.example", "127.0.0.1")) as server:
        assert server.http.get("/version", headers={"host": "api.example"}).status_code == 401
        shown = (page.path for page in (*pages(), *live_pages(), *reference_pages()))
        public = ("/livez", "/readyz", "/health", "/ping", "/v1/health", "/metrics", "/dashboard/history",
                  "/dashboard/diagnosis", *shown)  # fmt: skip
        for path in public:
            assert server.http.get(path).status_code == 200
        routes = [(route.path, method) for route in server.app.routes for method in sorted(route.methods or ())]
        assert len(routes) > 12
        for path, method in [*routes, ("/nothing", "GET")]:
            if path in public:
                continue
            for value in (None, "Bearer wrong", "Bearer", "Basic secret", "secret", "Bearer secret2"):
                headers = {} if value is None else {"authorization": value}
                reply = server.http.request(method, path, headers=headers)
                assert reply.status_code == 401, (path, method, value)
        assert reply.headers["www-authenticate"] == "Bearer"
        for key in ("secret", "other"):
            with server.openai(key) as client:
                assert client.completions.create(model="stub", prompt="a", max_tokens=1).choices


def test_metrics_and_health_ask_for_a_key_where_they_are_protected() -> None:
    with live(api_key=("secret",), protect_metrics=True) as server:
        for path in ("/health", "/ping", "/metrics"):
            assert server.http.get(path).status_code == 401
            assert server.http.get(path, headers={"authorization": "Bearer secret"}).status_code == 200
        assert server.http.get("/livez").status_code == server.http.get("/readyz").status_code == 200


def test_holders_of_different_keys_share_no_prefix() -> None:
    """Else one could confirm another's prompt block by block: `cached_tokens` and the time of a reply tell a hit."""

    def salts(*keys: str) -> list[str]:
        with live(api_key=keys) as server:
            for key in (*keys, keys[0]):
                with server.openai(key) as client:
                    for salt in ({}, {"cache_salt": "mine"}):
                        client.completions.create(model="stub", prompt="a", max_tokens=1, extra_body=salt)
                        client.chat.completions.create(model="stub", messages=HI, max_tokens=1, extra_body=salt)
            return [request.cache_salt for request in server.stub.submitted]

    found = salts("secret", "other")
    first, second = found[:4], found[4:8]
    assert not set(first) & set(second) and found[8:] == first, "one holder's requests share"
    assert first[0] == first[1] != first[2] == first[3], "and the body's salt still counts, on every path"
    assert salts("secret")[:4] == salts("secret", "secret")[:4] == ["", "", "mine", "mine"]


def test_a_model_without_template_refuses_chat() -> None:
    with live() as server:
        server.service.template = None
        reply = server.post("/v1/chat/completions", {"messages": HI})
        assert reply.status_code == 400 and "no chat template" in reply.json()["error"]["message"]


def test_random_bodies_never_give_a_5xx(server: LiveServer) -> None:
    """Every field with values of every kind, alone and together: refused by name, or served."""
    random = Random(7)
    values: list[Any] = [
        None,
        True,
        False,
        0,
        1,
        -1,
        2**31,
        2**63,
        2**70,
        -(2**70),
        0.5,
        -0.0,
        1e308,
        "",
        "a",
        "\u0000",
        "😀",
    ]
    values += [[], [1], ["a"], [[]], [[1]], [None], {}, {"a": 1}, {"type": "text"}, HI, [{"role": "user"}]]
    kinds: list[tuple[str, type[msgspec.Struct], dict[str, Any]]] = [
        ("/v1/completions", CompletionRequest, {"prompt": "a"}),
        ("/v1/chat/completions", ChatCompletionRequest, {"messages": HI}),
        ("/tokenize", TokenizeText, {"prompt": "a"}),
        ("/detokenize", DetokenizeRequest, {"tokens": [5]}),
    ]
    for path, kind, base in kinds:
        names = kind.__struct_fields__
        bodies = [base | {"max_tokens": 2} | {name: value} for name in names for value in random.sample(values, 6)]
        bodies += [
            base | {name: random.choice(values) for name in random.sample(names, min(3, len(names)))} for _ in range(60)
        ]
        for body in bodies:
            if path.endswith("tokenize"):
                body.pop("max_tokens", None)
            reply = server.post(path, body)
            assert reply.status_code in (200, 400, 404), (path, body, reply.text)
            assert reply.status_code == 200 or reply.json()["error"]["message"]
    assert server.engine.in_flight == 0 and server.engine.healthy
    server.stub.submitted.clear()
