"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.core.options.ranges import check_ranges
from quire.core.request import Request as EngineRequest
from quire.core.request import TokenLogprob
from quire.engine.requests import EncodedPrompt
from quire.server.apis.answer import respond
from quire.server.apis.openai.choices import Choices, ChoicesAnswer, State
from quire.server.apis.openai.prompts import cut, details_of, encode_chat
from quire.server.apis.openai.protocol import ChatCompletionRequest
from quire.server.apis.openai.replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionPart,
    ToolCallPart,
)
from quire.server.apis.openai.sampling_params import (
    beams_of,
    build_requests,
    drawn,
    read_body,
    sampling_params,
    token_limit,
)
from quire.server.apis.openai.structured_output import OutputShape
from quire.server.apis.openai.tools import asked_of, calling_of, warn_of_hidden_tools
from quire.server.http.body import LARGE, off_loop, off_read
from quire.server.http.routes import SSE, Route
from quire.server.keys import Tenant
from quire.server.service import Service
from quire.server.text_generation.assistant import Assistant, Message
from quire.server.text_generation.generation import Generated, Generation, Piece
from quire.server.text_generation.output_parsing import OutputParsing, inside_reasoning
from quire.server.text_generation.reports import CompletionTokens, Usage
from quire.text.messages.text_source import MessageDelta

_WALKED = LARGE + 1
"""Schemas of tools, which are walked through, may have any size."""


async def create_chat_completion(service: Service, request: Request) -> Response:
    """Answer a conversation. Return the answer whole or as a stream of events."""
    arrival = time.monotonic()
    body = await read_body(service, request, ChatCompletionRequest)
    request.state.ignored.extend(await off_read(request, details_of, body.messages))
    await warn_of_hidden_tools(service, request, body)
    generation, parsing = await submit_chat(service, body, arrival, request.state.tenant)
    return await respond(request, _Answer(service, body, generation, parsing))


def _check(body: ChatCompletionRequest) -> None:
    check_ranges(body, ("top_logprobs",))
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs: needs logprobs true", param="top_logprobs")
    if body.add_special_tokens:
        raise BadRequest("add_special_tokens: the chat template already adds them", param="add_special_tokens")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise BadRequest("max_tokens: differs from max_completion_tokens; give one", param="max_tokens")


async def submit_chat(
    service: Service, body: ChatCompletionRequest, arrival: float, tenant: Tenant
) -> tuple[Generated, OutputParsing]:
    """Start the answers to `body`, however it was asked. `BadRequest` naming its field."""
    _check(body)
    calling = await off_loop(_WALKED if body.tools else 0, calling_of, service, body)
    queued = service.engine.reserve(drawn(body), tenant.called(body.user), tenant.max_sequences)
    with queued, service.media.hold() as held:
        found = await encode_chat(service, body, "messages" if body.truncate_prompt_tokens is None else None, held)
        prompt = cut(found, body.truncate_prompt_tokens, service.engine.info.max_model_len)
        inside = inside_reasoning(service.formats, service.tokenizer, prompt.ids)
        formats = service.formats.forcing(calling.choice is not None)
        parsing = OutputParsing(formats, calling.schemas, body.parallel_tool_calls is not False, inside, calling.choice)
        shape = await off_loop(_WALKED if body.tools else 0, asked_of, service, body, parsing)
        requests = await _requests(service, body, prompt, shape, arrival, tenant)
    if body.use_beam_search and parsing.reads:
        raise BadRequest(
            "use_beam_search: this model's answers are read token by token for reasoning; use /v1/completions",
            param="use_beam_search",
        )
    if body.use_beam_search:
        return beams_of(service, body, requests), parsing
    shown = service.formats.shown if parsing.reads else frozenset[int]()
    made = Generation(service.engine, service.tokenizer, requests, parsing.reads, shown, shape.checks)
    return made, parsing


async def _requests(
    service: Service,
    body: ChatCompletionRequest,
    prompt: EncodedPrompt,
    shape: OutputShape,
    arrival: float,
    tenant: Tenant,
) -> list[EngineRequest]:
    info = service.engine.info
    asked, name = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, name = body.max_tokens, "max_tokens"
    params = sampling_params(
        body,
        service.defaults,
        shape,
        max_tokens=token_limit(info, len(prompt.ids), "messages", asked, name, service.defaults.get("max_tokens")),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        vocab_size=info.vocab_size,
    )
    return await build_requests(service, body, [prompt], [params], arrival, tenant, shape)


class _Answer(ChoicesAnswer[ChatCompletionRequest]):
    """The shapes of chat completions."""

    prefix = "chatcmpl"

    def __init__(
        self, service: Service, body: ChatCompletionRequest, generation: Generated, parsing: OutputParsing
    ) -> None:
        super().__init__(service, body, generation, scored=bool(body.logprobs))
        self._assistants = [Assistant(parsing) for _ in range(generation.count)]
        self.per_token |= parsing.reads  # a token without text may be a marker
        self._counts = parsing.formats.reasoning is not None
        self._reasons = body.include_reasoning is not False
        self._prompt_ids: list[int] | UnsetType = list(self.prompt(0)) if self.with_ids else UNSET

    def part(self, state: State, piece: Piece) -> ChatChunkChoice | None:
        """The role comes with a choice's first token: a first chunk is a first token."""
        said = self._assistants[piece.choice].push(piece)
        delta = delta_of(said.deltas, self._reasons)
        silent = delta == ChatDelta() and not said.logprobs and said.finish_reason is None and state.begun
        if silent and not (self.with_ids and piece.tokens):
            return None
        if not state.begun:
            delta.role = ROLE
            if delta.content is UNSET and delta.reasoning_content is UNSET and delta.tool_calls is UNSET:
                delta.content = ""
        return ChatChunkChoice(
            index=piece.choice,
            delta=delta,
            logprobs=self._entries(said.logprobs),
            finish_reason=said.finish_reason,
            stop_reason=UNSET if piece.finish_reason is None else piece.stop_reason,
            token_ids=piece.tokens if self.with_ids else UNSET,
        )

    def add(self, pieces: list[Piece]) -> None:
        """Collect for `reply`, as a message too."""
        super().add(pieces)
        for piece in pieces:
            self._assistants[piece.choice].push(piece)

    def said(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Content and calls of each choice."""
        return [each.said for each in self._assistants]

    def usage(self) -> Usage:
        """Usage with the tokens of reasoning, where the model's can be told."""
        usage = super().usage()
        if self._counts:
            details = usage.completion_tokens_details or CompletionTokens()
            details.reasoning_tokens = sum(each.reasoning_tokens for each in self._assistants)
            usage.completion_tokens_details = details
        return usage

    def whole(self, state: State, piece: Piece) -> ChatChoice:
        """A finished answer."""
        assistant = self._assistants[piece.choice]
        return ChatChoice(
            index=piece.choice,
            message=message_of(assistant.message, self._reasons),
            logprobs=self._entries(assistant.message.logprobs),
            finish_reason=assistant.ended(piece.finish_reason),
            stop_reason=piece.stop_reason,
            token_ids=piece.tokens if self.with_ids else UNSET,
        )

    def chunk_of(self, choices: Choices, usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        """The first one carries the prompt's ids."""
        ids, self._prompt_ids = self._prompt_ids, UNSET
        return ChatCompletionChunk(**self.facts, choices=choices, usage=usage, prompt_token_ids=ids)

    def reply_of(self, choices: Choices, usage: Usage) -> ChatCompletion:
        """Reply with the prompt's ids and log-probabilities, if they were asked for."""
        rows = self.prompt_rows(0)
        return ChatCompletion(
            **self.facts, choices=choices, usage=usage, prompt_token_ids=self._prompt_ids, prompt_logprobs=rows
        )

    def _entries(self, items: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        return self.logprobs.chat(items, self.body.top_logprobs or 0) if self.body.logprobs else None


ROLE = "assistant"


def delta_of(deltas: Sequence[MessageDelta], reasons: bool) -> ChatDelta:
    """One chunk's; a call's start and its first arguments in it are one part. `reasons`: reasoning is shown."""
    out = ChatDelta()
    calls: dict[int, ToolCallPart] = {}
    for delta in deltas:
        if delta.kind == "content":
            out.content = (out.content or "") + delta.text
        elif delta.kind == "reasoning":
            if reasons:
                out.reasoning_content = (out.reasoning_content or "") + delta.text
        elif delta.kind == "call":
            function = FunctionPart(name=delta.name, arguments="")
            calls[delta.index] = ToolCallPart(index=delta.index, id=delta.id, type="function", function=function)
        else:
            part = calls.setdefault(delta.index, ToolCallPart(index=delta.index, function=FunctionPart(arguments="")))
            part.function.arguments += delta.text
    if calls:
        out.tool_calls = list(calls.values())
    return out


def message_of(said: Message, reasons: bool) -> ChatMessage:
    """A whole message."""
    empty = not said.content and (said.calls or said.reasoning)
    message = ChatMessage(role=ROLE, content=None if empty else said.content)
    if said.reasoning and reasons:
        message.reasoning_content = said.reasoning
    if said.calls:
        message.tool_calls = [
            ToolCallPart(id=call.id, type="function", function=FunctionPart(name=call.name, arguments=call.arguments))
            for call in said.calls
        ]
    return message


ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        body=(ChatCompletionRequest,),
        reply=(ChatCompletion,),
        stream=SSE,
        generates=True,
        operation="chat",
        batchable=True,
    ),
)
