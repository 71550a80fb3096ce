"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over chat completions."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.core.request import TokenLogprob, random_id
from quire.server.apis.answer import respond
from quire.server.apis.anthropic.bodies import FIELD_NAMES, CountRequest, MessagesRequest, chat_of
from quire.server.apis.message_answer import Block, BlockChange, MessageAnswer, arguments_of, named_event
from quire.server.apis.openai.chat import submit_chat
from quire.server.apis.openai.prompts import encode_chat
from quire.server.apis.openai.sampling_params import check_body, mapped_fields
from quire.server.apis.openai.tools import calling_of, warn_of_hidden_tools
from quire.server.apis.unsupported import without_effect
from quire.server.http.body import off_read, read_struct
from quire.server.http.dialects import ANTHROPIC
from quire.server.http.json_response import JsonResponse
from quire.server.http.routes import SSE, Route
from quire.server.service import Service
from quire.server.text_generation.generation import Generated
from quire.server.text_generation.output_parsing import OutputParsing
from quire.server.text_generation.reports import Report


class AnthropicUsage(msgspec.Struct, kw_only=True):
    """Tokens; `input_tokens` are those that the prefix cache did not have. Nobody pays for writing it."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessagesReply(msgspec.Struct, kw_only=True):
    """Response of /v1/messages, and beginning of its stream."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage
    quire: Report | UnsetType = UNSET


class Count(msgspec.Struct, kw_only=True):
    """Response of /v1/messages/count_tokens."""

    input_tokens: int


async def create_message(service: Service, request: Request) -> Response:
    """Answer a conversation in Anthropic's format, whole or as a stream of events."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: MessagesRequest)
    request.state.ignored.extend(without_effect(body, ("service_tier",)))
    chat = await off_read(request, chat_of, service, body)
    with mapped_fields(FIELD_NAMES):
        check_body(service, chat)
        await warn_of_hidden_tools(service, request, chat)
        generation, parsing = await submit_chat(service, chat, arrival, request.state.tenant)
    answer = _Answer(
        service, generation, parsing,
        model=service.answering(body.model), stream=bool(body.stream), reasons=chat.include_reasoning is not False,
    )  # fmt: skip
    return await respond(request, answer)


async def count_tokens(service: Service, request: Request) -> Response:
    """Return the number of prompt tokens of a conversation."""
    body = await read_struct(request, service.options, lambda _: CountRequest)
    chat = await off_read(request, chat_of, service, body)
    with mapped_fields(FIELD_NAMES):
        check_body(service, chat)
        await off_read(request, calling_of, service, chat)
        with service.media.hold() as held:
            prompt = await encode_chat(service, chat, None, held)
    return JsonResponse(msgspec.json.encode(Count(input_tokens=len(prompt.ids))))


class _Answer(MessageAnswer):
    """Blocks have the types text, thinking (unsigned: nobody need check where a text is from) and tool_use."""

    dialect = ANTHROPIC

    def __init__(self, service: Service, generation: Generated, parsing: OutputParsing, **facts: Any) -> None:
        super().__init__(service, generation, parsing, **facts)
        self._id = f"msg_{random_id()}"

    def opening(self) -> bytes:
        """The message without its content."""
        return named_event("message_start", message=self._reply([]))

    def message(self, steps: Iterable[BlockChange], logprobs: list[TokenLogprob]) -> bytes:
        """An event for each step."""
        return b"".join(_event(step) for step in steps)

    def closing(self) -> bytes:
        """Why it ended, and the usage."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        more = {"quire": self.verdict} if self.schema_errors else {}
        return named_event("message_delta", delta=delta, usage=self._usage(), **more) + named_event("message_stop")

    def whole(self) -> MessagesReply:
        """The message."""
        return self._reply([_whole(block) for block in self.blocks.all])

    def _reply(self, content: list[dict[str, Any]]) -> MessagesReply:
        return MessagesReply(
            id=self._id,
            model=self.model,
            content=content,
            stop_reason=self._stop_reason,
            stop_sequence=self._stop_sequence,
            usage=self._usage(),
            quire=self.verdict,
        )

    @property
    def _stop_sequence(self) -> str | None:
        return self.stop_reason if isinstance(self.stop_reason, str) else None

    @property
    def _stop_reason(self) -> str | None:
        if self.finish_reason != "stop":
            return None if self.finish_reason is None else "max_tokens"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self.calls else "end_turn"

    def _usage(self) -> AnthropicUsage:
        usage = self.generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return AnthropicUsage(
            input_tokens=usage.prompt_tokens - cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=cached,
        )


def _event(step: BlockChange) -> bytes:
    if step.what == "begin":
        return named_event("content_block_start", index=step.index, content_block=_empty(step.block))
    if step.what == "end":
        return named_event("content_block_stop", index=step.index)
    kind, field = {
        "content": ("text_delta", "text"),
        "reasoning": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }[step.block.kind]
    return named_event("content_block_delta", index=step.index, delta={"type": kind, field: step.text})


def _empty(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return _empty(block) | {"input": arguments_of(block.text)}
    return _empty(block) | {"thinking" if block.kind == "reasoning" else "text": block.text}


ROUTES = (
    Route(
        "POST",
        "/v1/messages",
        create_message,
        body=(MessagesRequest,),
        reply=(MessagesReply,),
        stream=SSE,
        dialect=ANTHROPIC,
        generates=True,
        operation="chat",
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        body=(CountRequest,),
        reply=(Count,),
        dialect=ANTHROPIC,
    ),
)
