"""Ollama's API over chat completions: /api/generate and /api/chat, as lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.core.request import TokenLogprob
from quire.server.apis.answer import respond
from quire.server.apis.message_answer import Block, BlockChange, MessageAnswer, arguments_of
from quire.server.apis.ollama.bodies import (
    FIELD_NAMES,
    ChatRequest,
    GenerateRequest,
    OllamaRequest,
    chat_of,
    continuation_of,
    ignored_of,
    sources_of,
)
from quire.server.apis.openai.chat import submit_chat
from quire.server.apis.openai.completions import submit_completion
from quire.server.apis.openai.logprobs import LogprobWriter
from quire.server.apis.openai.sampling_params import check_body, mapped_fields
from quire.server.apis.openai.tools import warn_of_hidden_tools
from quire.server.http.body import off_read, read_struct
from quire.server.http.dialects import OLLAMA
from quire.server.http.json_response import JsonResponse
from quire.server.http.routes import JSON_LINES, Route
from quire.server.service import Service
from quire.server.text_generation.generation import Generated
from quire.server.text_generation.output_parsing import Formats, OutputParsing
from quire.server.text_generation.reports import Report

_encode = msgspec.json.encode
_NANO = 1_000_000_000
PLAIN = OutputParsing(Formats(None, None))
"""How a text is read that is nothing but text."""


class OllamaReply(msgspec.Struct, kw_only=True):
    """Response of /api/chat (`message`) and /api/generate (`response`), and each line of their streams.

    What follows `done_reason` comes with the last line; durations are in nanoseconds.
    """

    model: str
    created_at: str
    message: dict[str, Any] | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    quire: Report | UnsetType = UNSET


async def generate(service: Service, request: Request) -> Response:
    """Answer or continue a prompt in Ollama's format, whole or as lines of JSON."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: GenerateRequest)
    request.state.ignored.extend(ignored_of(body))
    service.check_model(body.model)
    if not body.prompt and not body.suffix and not body.images:
        return _loaded(service, body)
    if service.template is not None and not body.raw and not body.suffix:
        return await _chat(service, request, body, arrival)
    completion = continuation_of(service, body)
    sources = sources_of(body.images, "images")
    with mapped_fields(FIELD_NAMES):
        check_body(service, completion)
        generation = await submit_completion(
            service, completion, arrival, request.state.tenant, most=None, sources=sources
        )
    return await respond(request, _Answer(service, generation, PLAIN, body))


async def chat(service: Service, request: Request) -> Response:
    """Answer a conversation in Ollama's format, whole or as lines of JSON."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: ChatRequest)
    request.state.ignored.extend(ignored_of(body))
    service.check_model(body.model)
    return await _chat(service, request, body, arrival) if body.messages else _loaded(service, body)


async def _chat(service: Service, request: Request, body: GenerateRequest | ChatRequest, arrival: float) -> Response:
    asked = await off_read(request, chat_of, service, body)
    with mapped_fields(FIELD_NAMES):
        check_body(service, asked)
        await warn_of_hidden_tools(service, request, asked)
        generation, parsing = await submit_chat(service, asked, arrival, request.state.tenant)
    answer = _Answer(service, generation, parsing, body, reasons=asked.include_reasoning is not False)
    return await respond(request, answer)


def _loaded(service: Service, body: OllamaRequest) -> Response:
    """Clients that ask for nothing want the model in memory, where it is, or out of it: it stays all the same, which
    the reply and the `Warning` header say."""
    empty: dict[str, Any] = {"response": ""}
    if isinstance(body, ChatRequest):
        empty = {"message": {"role": "assistant", "content": ""}}
    reply = OllamaReply(model=body.model, created_at=_now(), done=True, done_reason="load", **empty)
    return JsonResponse(_encode(reply))


class _Answer(MessageAnswer):
    """Calls of tools are said when they are whole, in one line each."""

    dialect = OLLAMA

    def __init__(
        self, service: Service, generation: Generated, parsing: OutputParsing, body: OllamaRequest, reasons: bool = True
    ) -> None:
        super().__init__(
            service, generation, parsing, model=body.model, stream=body.stream is not False, reasons=reasons
        )
        self._chats = isinstance(body, ChatRequest)
        self._top = (body.top_logprobs or 0) if body.logprobs or body.top_logprobs else None
        self._names = LogprobWriter(service.tokenizer, as_ids=False)

    def message(self, steps: Iterable[BlockChange], logprobs: list[TokenLogprob]) -> bytes:
        """A line for each gain and each call."""
        lines: list[OllamaReply] = []
        for step in steps:
            if step.block.kind == "call":
                if step.what == "end":
                    lines.append(self._line([step.block]))
            elif step.what == "gain":
                lines.append(self._line([Block(step.block.kind, step.text)]))
        if logprobs and self._top is not None:
            lines = lines or [self._line([])]
            lines[-1].logprobs = self._entries(logprobs)
        return b"".join(_encode(line) + b"\n" for line in lines)

    def closing(self) -> bytes:
        """The account."""
        return _encode(self._ended(self._line([]))) + b"\n"

    def whole(self) -> OllamaReply:
        """Reply with the whole answer."""
        reply = self._ended(self._line(self.blocks.all))
        if self._top is not None:
            reply.logprobs = self._entries(self.logprobs)
        return reply

    def _line(self, blocks: list[Block]) -> OllamaReply:
        said = {kind: "".join(b.text for b in blocks if b.kind == kind) for kind in ("content", "reasoning")}
        reply = OllamaReply(model=self.model, created_at=_now(), done=False)
        if not self._chats:
            reply.response, reply.thinking = said["content"], said["reasoning"] or UNSET
            return reply
        message: dict[str, Any] = {"role": "assistant", "content": said["content"]}
        if said["reasoning"]:
            message["thinking"] = said["reasoning"]
        if calls := [block for block in blocks if block.kind == "call"]:
            message["tool_calls"] = [_call(block) for block in calls]
        reply.message = message
        return reply

    def _ended(self, reply: OllamaReply) -> OllamaReply:
        usage, times = self.generation.usage(), self.generation.timings()
        request = self.generation.requests[0]
        # A grammar closes what the limit cuts short, which then is whole and ends as the model would end it.
        closed = request.grammar is not None and usage.completion_tokens >= (request.params.max_tokens or 0)
        stopped = self.finish_reason == "stop" and not closed
        reply.done, reply.done_reason = True, "stop" if stopped else "length"
        reply.total_duration, reply.load_duration = _nanos(times.e2e_seconds), 0
        reply.prompt_eval_count, reply.prompt_eval_duration = usage.prompt_tokens, _nanos(times.prefill_seconds)
        reply.eval_count, reply.eval_duration = usage.completion_tokens, _nanos(times.decode_seconds)
        reply.quire = self.verdict
        return reply

    def _entries(self, items: list[TokenLogprob]) -> list[Any]:
        return list(self._names.chat(items, self._top or 0).content)


def _call(block: Block) -> dict[str, Any]:
    return {"id": block.id, "function": {"name": block.name, "arguments": arguments_of(block.text)}}


def _nanos(seconds: float | None) -> int:
    return round((seconds or 0.0) * _NANO)


def _now() -> str:
    return stamp(time.time())


def stamp(seconds: float) -> str:
    """A time since 1970 as Ollama writes it (RFC 3339)."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


ROUTES = (
    Route(
        "POST",
        "/api/generate",
        generate,
        body=(GenerateRequest,),
        reply=(OllamaReply,),
        stream=JSON_LINES,
        dialect=OLLAMA,
        generates=True,
        operation="text_completion",
    ),
    Route(
        "POST",
        "/api/chat",
        chat,
        body=(ChatRequest,),
        reply=(OllamaReply,),
        stream=JSON_LINES,
        dialect=OLLAMA,
        generates=True,
        operation="chat",
    ),
)
