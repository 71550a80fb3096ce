"""What becomes of each field that clients of OpenAI and vLLM may send: found by sending it. `make fields` writes it.

A field is honoured where the engine's request or the reply is another than without it; else it is named in the reply's
`Warning` header, or refused by its name. A field that is none of these is an error here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

import live_server
from live_server import LiveServer, live, text_tools
from paths import DOCS
from quire.text.template import ChatTemplate
from stub_engine import StubEngine, stub_info
from tool_replies import TEMPLATE, TOOLS

TABLE = DOCS / "request-fields.md"
BEGIN, END = "<!-- fields x routes: make fields -->\n", "<!-- end of fields x routes -->\n"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ROUTES = (CHAT, COMPLETIONS, RESPONSES)
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 5},
    COMPLETIONS: {"prompt": "hello", "max_tokens": 4, "seed": 5},
    RESPONSES: {"input": "hi", "max_output_tokens": 20, "seed": 5},
}
OF_OPENAI: dict[str, set[str]] = {
    CHAT: set(chat_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"},
    COMPLETIONS: set(completion_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"},
    RESPONSES: set(response_create_params.ResponseCreateParamsBase.__annotations__) | {"stream"},
}
_SAMPLING = {
    "use_beam_search", "top_k", "min_p", "repetition_penalty", "watermarking", "length_penalty", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
    "truncate_prompt_tokens", "truncation_side", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids",
    "bad_words", "add_special_tokens", "response_format", "structured_outputs", "priority", "request_id", "session_id",
    "return_tokens_as_token_ids", "return_token_ids", "routed_experts_prompt_start", "return_token_offsets",
    "return_mm_kwargs", "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection",
    "thinking_token_budget", "stream_interval", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_decoding_backend", "guided_whitespace_pattern",
}  # fmt: skip
OF_VLLM: dict[str, set[str]] = {
    CHAT: _SAMPLING | {"include_reasoning", "echo", "add_generation_prompt", "continue_final_message", "documents",
                       "chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs",
                       "return_prompt_text"},
    COMPLETIONS: _SAMPLING | {"prompt_embeds"},
    RESPONSES: {"top_k", "min_p", "repetition_penalty", "seed", "stop", "logit_bias", "ignore_eos", "request_id",
                "priority", "cache_salt", "structured_outputs", "chat_template_kwargs", "vllm_xargs",
                "kv_transfer_params", "mm_processor_kwargs", "skip_special_tokens", "include_stop_str_in_output",
                "presence_penalty", "frequency_penalty"},
}  # fmt: skip
"""As the sources of vLLM 0.33 say; the guided_ names are older."""
_LLAMA_CPP = {"grammar", "json_schema", "timings_per_token"}
OF_LLAMA_CPP: dict[str, set[str]] = {CHAT: _LLAMA_CPP, COMPLETIONS: _LLAMA_CPP}
"""Those that llama-server adds and that change an answer."""
_SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
_FUNCTION: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
SAMPLES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "other"}], "prompt": "other", "input": "other", "model": "other",
    "max_tokens": 3, "max_completion_tokens": 3, "max_output_tokens": 19, "n": 2, "best_of": 3, "temperature": 0.5,
    "top_p": 0.5, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"9": 1.0}, "seed": 6, "stop": "x",
    "stream": True,
    "stream_options": {CHAT: {"include_usage": True}, COMPLETIONS: {"include_usage": True},
                       RESPONSES: {"include_obfuscation": True}}, "logprobs": 1, "top_logprobs": 2, "echo": True,
    "suffix": "end", "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
    "parallel_tool_calls": False, "prompt_cache_key": "k", "safety_identifier": "s", "tools": TOOLS,
    "tool_choice": "none", "functions": [{"name": "f"}], "function_call": {"name": "f"}, "reasoning_effort": "none",
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
    "structured_outputs": {"choice": ["a", "b"]}, "guided_json": {"const": 5}, "guided_regex": "[ab]",
    "guided_choice": ["a", "b"], "guided_grammar": 'root ::= "a"', "guided_decoding_backend": "xgrammar",
    "grammar": 'root ::= "a"', "json_schema": {"const": 5}, "timings_per_token": True,
    "guided_whitespace_pattern": "[ ]?", "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5, "length_penalty": 0.5,
    "stop_token_ids": [9], "allowed_token_ids": [9, 10], "bad_words": ["a"], "min_tokens": 2, "prompt_logprobs": 1,
    "truncate_prompt_tokens": 1, "priority": 3, "cache_salt": "s", "request_id": "mine", "use_beam_search": True,
    "skip_special_tokens": False, "spaces_between_special_tokens": False, "include_stop_str_in_output": True,
    "ignore_eos": True, "add_special_tokens": {COMPLETIONS: False, CHAT: True}, "return_token_ids": True,
    "return_tokens_as_token_ids": True, "chat_template_kwargs": {"enable_thinking": False}, "chat_template": "{{ 1 }}",
    "include_reasoning": False, "add_generation_prompt": False, "continue_final_message": True,
    "documents": [{"text": "a"}], "verbosity": "low", "modalities": ["audio"], "audio": {"voice": "a"},
    "prediction": {"type": "content", "content": "a"}, "web_search_options": {}, "kv_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1}, "prompt_embeds": "AAAA", "mm_processor_kwargs": {"a": 1}, "background": True,
    "conversation": "c", "include": ["message.output_text.logprobs"], "instructions": "Be short.", "max_tool_calls": 1,
    "previous_response_id": "resp_0", "reasoning": {"effort": "none"}, "truncation": "auto",
    "text": {"format": {"type": "json_object"}},
}  # fmt: skip
"""A value of each that asks for something; what is not here is sent as 1."""
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    (CHAT, "top_logprobs"): {"logprobs": True},
    (CHAT, "return_tokens_as_token_ids"): {"logprobs": True},
    (COMPLETIONS, "return_tokens_as_token_ids"): {"logprobs": 1},
    (CHAT, "tool_choice"): {"tools": TOOLS},
    (RESPONSES, "tool_choice"): {"tools": [_FUNCTION]},
    (CHAT, "include_reasoning"): {"max_tokens": 40},
    (CHAT, "max_completion_tokens"): {"max_tokens": None},
    **{(route, "use_beam_search"): {"seed": None} for route in ROUTES[:2]},
    (COMPLETIONS, "length_penalty"): {"use_beam_search": True, "n": 2, "seed": None},
    (CHAT, "continue_final_message"): {"add_generation_prompt": False},
    (CHAT, "add_generation_prompt"): {"chat_template_kwargs": {"enable_thinking": False}},
    **{(route, "stream_options"): {"stream": True} for route in ROUTES},
    **{(route, "include_stop_str_in_output"): {"stop": "x"} for route in ROUTES},
    **{(route, "guided_whitespace_pattern"): {"guided_json": _SCHEMA, "max_tokens": 60} for route in ROUTES[:2]},
    **{(route, name): {"max_tokens": 60} for route in ROUTES[:2] for name in ("response_format", "guided_json")},
    **{(CHAT, name): {"max_tokens": 200, "tools": TOOLS} for name in ("parallel_tool_calls",)},
}  # fmt: skip
"""What a field needs to mean something; the same is sent without it."""


ELSEWHERE = {(COMPLETIONS, "add_special_tokens"), (COMPLETIONS, "length_penalty")}
"""Seen by tests/server/apis/test_request_fields.py, as the embedded model's texts have no special tokens around
them, and by tests/server/apis/test_more_completions.py, as the engine here gives the same beams at any penalty."""


class Outcome(NamedTuple):
    """`word`: yes, ignored, or refused with the `reason`."""

    word: str
    reason: str = ""


@contextmanager
def server() -> Iterator[LiveServer]:
    """One whose model thinks and calls functions, over an engine that pretends."""
    tokenizer, _ = text_tools()
    stub = StubEngine(stub_info(max_model_len=512))
    calls = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>\n'
    stub.script = tokenizer.encode(f"<think>\nHm.\n</think>\n\nSo.{calls}{calls}", add_special_tokens=False)
    ended = TEMPLATE.replace("{% endif %}{% endfor %}", "{% endif %}<end>{% endfor %}")
    made = ChatTemplate({"default": ended}, tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_server, "text_tools", lambda: (tokenizer, made))
        with live(stub, scheduling_policy="priority") as running:
            yield running


def outcome(server: LiveServer, route: str, name: str) -> Outcome:
    """What becomes of the field."""
    sample = SAMPLES.get(name, 1)
    if isinstance(sample, dict) and route in sample:
        sample = sample[route]
    if route == CHAT and name == "logprobs":
        sample = True
    if route == RESPONSES and name == "tools":
        sample = [_FUNCTION]
    least = LEAST[route] | BESIDE.get((route, name), {})
    plain, given = _sent(server, route, least), _sent(server, route, {**least, name: sample})
    assert plain[0].status_code == 200, (route, name, plain[0].text)
    reply = given[0]
    if reply.status_code in (400, 404):
        error = reply.json()["error"]
        if name in ("model", "previous_response_id"):
            return Outcome("yes")
        assert error["param"].split(".")[0].split("[")[0] == name, (route, name, error)
        return Outcome("refused", error["message"].partition(": ")[2])
    assert reply.status_code == 200, (route, name, reply.text)
    if (route, name) in ELSEWHERE:
        return Outcome("yes")
    if name in reply.headers.get("warning", "").partition("here: ")[2]:
        return Outcome("ignored")
    assert given[1:] != plain[1:], f"{route}: {name} changed nothing, and nobody was told"
    return Outcome("yes")


def _sent(server: LiveServer, route: str, body: dict[str, Any]) -> tuple[Any, Any, str]:
    """The reply, what the engine was asked, and what the reply says, without what differs each time."""
    reply = server.post(route, body)
    asked = None
    if reply.status_code == 200:
        found = server.stub.submitted[-1]
        seed = 0 if body.get("seed") is None else found.seed
        asked = msgspec.structs.replace(found, id="", arrival=0.0, seed=seed)
    said = re.sub(r'[0-9a-f]{32}|"created(_at)?":\d+', "", reply.text)
    return reply, asked, said


def lines(server: LiveServer) -> list[str]:
    """The table's rows, and its notes."""
    rows, notes = [], dict[str, int]()
    known = {route: OF_OPENAI[route] | OF_VLLM[route] | OF_LLAMA_CPP.get(route, set()) for route in ROUTES}
    for name in sorted(set().union(*known.values())):
        cells = []
        for route in ROUTES:
            if name not in known[route]:
                cells.append("-")
                continue
            found = outcome(server, route, name)
            number = notes.setdefault(found.reason, len(notes) + 1) if found.reason else 0
            cells.append(f"({number})" if number else found.word)
        rows.append(f"| `{name}` | {' | '.join(cells)} |\n")
    told = [f"{number}. {reason}\n" for reason, number in notes.items()]
    head = ["| field | chat completions | completions | responses |\n", "|---|---|---|---|\n"]
    return [*head, *rows, "\nRefused:\n\n", *told]


def main() -> None:
    """Write the table."""
    with server() as running:
        found = "".join(lines(running))
    before, _, rest = TABLE.read_text().partition(BEGIN)
    TABLE.write_text(before + BEGIN + found + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
