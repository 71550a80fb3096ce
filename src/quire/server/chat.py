"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.core.params import MAX_LOGPROBS
from quire.core.request import TokenLogprob
from quire.server.body import read_struct
from quire.server.convert import (
    build_requests,
    check_fields,
    new_id,
    sampling_params,
    token_limit,
)
from quire.server.generation import Generation, Piece, cancel_on_disconnect
from quire.server.logprobs import LogprobWriter
from quire.server.prompts import encode_chat, truncate
from quire.server.protocol import ChatCompletionRequest
from quire.server.replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    PromptLogprobs,
    Usage,
)
from quire.server.service import Service
from quire.server.sse import EventStream, event
from quire.server.unbuilt import refuse_unbuilt

ROLE = "assistant"


async def create_chat_completion(service: Service, request: Request) -> Response:
    """Answer a conversation, whole or as a stream of server-sent events."""
    arrival = time.monotonic()
    options = service.options
    body = await read_struct(request, ChatCompletionRequest, limit=options.max_body_bytes, timeout=options.body_timeout)
    refuse_unbuilt(body)
    service.check_model(body.model)
    check_fields(body, service.config.scheduler.scheduling_policy)
    _check(body)
    generation = await _submit(service, body, arrival, request.state.tenant)
    writer = _Writer(service, body, generation)
    if body.stream:
        return EventStream(generation, writer.chunk, writer.tail)
    try:
        async with cancel_on_disconnect(request.receive):
            async for pieces in generation.pieces():
                writer.add(pieces)
    finally:
        generation.close()
    return Response(writer.reply(), media_type="application/json")


def _check(body: ChatCompletionRequest) -> None:
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise BadRequest(f"top_logprobs: must lie in [0, {MAX_LOGPROBS}]", param="top_logprobs")
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs: needs logprobs true", param="top_logprobs")
    if body.add_special_tokens:
        raise BadRequest("add_special_tokens: the chat template already adds them", param="add_special_tokens")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise BadRequest("max_tokens: differs from max_completion_tokens; give one", param="max_tokens")


async def _submit(service: Service, body: ChatCompletionRequest, arrival: float, tenant: str) -> Generation:
    info = service.engine.info
    prompt = truncate(await encode_chat(service, body), body.truncate_prompt_tokens, info.max_model_len)
    asked, name = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, name = body.max_tokens, "max_tokens"
    params = sampling_params(
        body,
        service.defaults,
        max_tokens=token_limit(info, len(prompt), "messages", asked, name, service.defaults.get("max_tokens")),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        vocab_size=info.vocab_size,
    )
    requests = await build_requests(service, body, [prompt], [params], arrival, tenant)
    return Generation(service.engine, service.tokenizer, requests)


@dataclass(slots=True)
class _State:
    """What one choice has collected."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    begun: bool = False


class _Writer:
    """Pieces -> chunks, or one reply."""

    def __init__(self, service: Service, body: ChatCompletionRequest, generation: Generation) -> None:
        self._service = service
        self._body = body
        self._generation = generation
        self._id = new_id("chatcmpl", body)
        self._created = int(time.time())
        self._states = [_State() for _ in range(generation.count)]
        self._logprobs = LogprobWriter(service.tokenizer, bool(body.return_tokens_as_token_ids))
        self._prompt_logprobs: list[TokenLogprob] = []
        self._first = True
        self._per_token = bool(body.logprobs or body.return_token_ids)
        options = body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.include_usage and options.continuous_usage_stats)

    def _entries(self, items: list[TokenLogprob]) -> ChatLogprobs | None:
        return self._logprobs.chat(items, self._body.top_logprobs or 0) if self._body.logprobs else None

    def _prompt_ids(self) -> list[int] | UnsetType:
        return list(self._generation.requests[0].prompt) if self._body.return_token_ids else UNSET

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> bytes:
        chunk = ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._service.answering(self._body.model),
            system_fingerprint=self._service.fingerprint,
            choices=choices,
            usage=usage,
        )
        if self._first:
            self._first = False
            chunk.prompt_token_ids = self._prompt_ids()
        return event(chunk)

    def chunk(self, pieces: list[Piece]) -> bytes:
        """The events of one step. The role comes with a choice's first token: a first chunk is a first token."""
        events = []
        for piece in pieces:
            state = self._states[piece.choice]
            if not (piece.text or piece.finish_reason or (piece.tokens and self._per_token)):
                continue
            delta = ChatDelta(content=piece.text) if piece.text or not state.begun else ChatDelta()
            if not state.begun:
                state.begun = True
                delta.role = ROLE
            choice = ChatChunkChoice(
                index=piece.choice,
                delta=delta,
                logprobs=self._entries(piece.logprobs),
                finish_reason=piece.finish_reason,
                stop_reason=UNSET if piece.finish_reason is None else piece.stop_reason,
                token_ids=piece.tokens if self._body.return_token_ids else UNSET,
            )
            usage: Usage | UnsetType | None = None if self._usage_at_end else UNSET
            events.append(self._chunk([choice], self._generation.usage() if self._usage_always else usage))
        return b"".join(events)

    def tail(self) -> bytes:
        """What follows the last choice: usage, if asked for."""
        return self._chunk([], self._generation.usage()) if self._usage_at_end else b""

    def add(self, pieces: list[Piece]) -> None:
        """Collect for `reply`."""
        for piece in pieces:
            state = self._states[piece.choice]
            state.text.append(piece.text)
            state.tokens += piece.tokens
            state.logprobs += piece.logprobs
            if piece.prompt_logprobs:
                self._prompt_logprobs = piece.prompt_logprobs
            if piece.finish_reason is not None:
                state.finish_reason, state.stop_reason = piece.finish_reason, piece.stop_reason

    def reply(self) -> bytes:
        """The whole response."""
        choices = [
            ChatChoice(
                index=number,
                message=ChatMessage(role=ROLE, content="".join(state.text)),
                logprobs=self._entries(state.logprobs),
                finish_reason=state.finish_reason,
                stop_reason=state.stop_reason,
                token_ids=state.tokens if self._body.return_token_ids else UNSET,
            )
            for number, state in enumerate(self._states)
        ]
        rows: PromptLogprobs | UnsetType = UNSET
        if (count := self._body.prompt_logprobs) is not None:
            rows = self._logprobs.prompt(self._generation.requests[0].prompt, self._prompt_logprobs, count)
        completion = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._service.answering(self._body.model),
            system_fingerprint=self._service.fingerprint,
            choices=choices,
            usage=self._generation.usage(),
            prompt_token_ids=self._prompt_ids(),
            prompt_logprobs=rows,
        )
        return msgspec.json.encode(completion)
