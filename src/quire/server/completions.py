"""POST /v1/completions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.core.request import TokenLogprob
from quire.server.body import read_struct
from quire.server.convert import (
    COMPLETION_MAX_TOKENS,
    build_requests,
    check_fields,
    new_id,
    sampling_params,
    token_limit,
)
from quire.server.generation import Generation, Piece, cancel_on_disconnect
from quire.server.logprobs import LogprobWriter
from quire.server.prompts import encode_prompts, truncate
from quire.server.protocol import CompletionRequest
from quire.server.replies import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs, Usage
from quire.server.service import Service
from quire.server.sse import EventStream, event
from quire.server.unbuilt import refuse_unbuilt


async def create_completion(service: Service, request: Request) -> Response:
    """Continue one or many prompts, whole or as a stream of server-sent events."""
    arrival = time.monotonic()
    options = service.options
    body = await read_struct(request, CompletionRequest, limit=options.max_body_bytes, timeout=options.body_timeout)
    refuse_unbuilt(body, built=frozenset({"echo"}))
    service.check_model(body.model)
    check_fields(body, service.config.scheduler.scheduling_policy)
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


async def _submit(service: Service, body: CompletionRequest, arrival: float, tenant: str) -> Generation:
    info = service.engine.info
    prompts = await encode_prompts(service, body.prompt, body.add_special_tokens is not False)
    echo_only = bool(body.echo) and body.max_tokens == 0
    params = []
    for i, ids in enumerate(prompts):
        prompts[i] = ids = truncate(ids, body.truncate_prompt_tokens, info.max_model_len)
        asked = 1 if echo_only else body.max_tokens
        max_tokens = token_limit(info, len(ids), "prompt", asked, "max_tokens", COMPLETION_MAX_TOKENS)
        param = sampling_params(
            body, service.defaults, max_tokens=max_tokens, logprobs=body.logprobs, vocab_size=info.vocab_size
        )
        if body.echo and body.logprobs is not None:
            wanted = max(body.logprobs, body.prompt_logprobs or 0)
            param = msgspec.structs.replace(param, prompt_logprobs=wanted)
        params.append(param)
    requests = await build_requests(service, body, prompts, params, arrival, tenant)
    return Generation(service.engine, service.tokenizer, requests)


@dataclass(slots=True)
class _State:
    """What one choice has collected."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    offset: int = 0
    begun: bool = False


class _Writer:
    """Pieces -> chunks, or one reply."""

    def __init__(self, service: Service, body: CompletionRequest, generation: Generation) -> None:
        self._service = service
        self._body = body
        self._generation = generation
        self._id = new_id("cmpl", body)
        self._created = int(time.time())
        self._states = [_State() for _ in range(generation.count)]
        self._logprobs = LogprobWriter(service.tokenizer, bool(body.return_tokens_as_token_ids))
        self._prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        self._echo_only = bool(body.echo) and body.max_tokens == 0
        options = body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.include_usage and options.continuous_usage_stats)

    def _prompt_of(self, choice: int) -> int:
        return choice // (self._body.n or 1)

    def _prompt(self, choice: int) -> tuple[int, ...]:
        return self._generation.requests[self._prompt_of(choice)].prompt

    def _take(self, pieces: list[Piece]) -> None:
        """Note prompt log-probabilities before any choice is written: all `n` choices of a prompt show them."""
        for piece in pieces:
            if piece.prompt_logprobs:
                self._prompt_logprobs.setdefault(self._prompt_of(piece.choice), piece.prompt_logprobs)
            if self._echo_only:
                piece.text, piece.tokens, piece.logprobs = "", [], []
                if piece.finish_reason is not None:
                    piece.finish_reason, piece.stop_reason = "length", None

    def _choice(self, number: int, state: _State, piece: Piece) -> CompletionChoice:
        """A chunk's choice; the first one of a choice carries the echoed prompt."""
        text, entries = piece.text, list[TokenLogprob | int](piece.logprobs)
        first, state.begun = not state.begun, True
        if first and self._body.echo:
            prompt = self._prompt(number)
            text = self._echo_text(number) + text
            found = self._prompt_logprobs.get(self._prompt_of(number), [])
            entries = [*prompt[: len(prompt) - len(found)], *found, *entries]
        logprobs: CompletionLogprobs | None = None
        if self._body.logprobs is not None:
            logprobs, state.offset = self._logprobs.completion(entries, self._body.logprobs, state.offset)
        with_ids = bool(self._body.return_token_ids)
        return CompletionChoice(
            index=number,
            text=text,
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.tokens if with_ids else UNSET,
            prompt_token_ids=list(self._prompt(number)) if with_ids and first else UNSET,
        )

    def _echo_text(self, number: int) -> str:
        """The prompt as it was sent, or the text of its tokens if those were sent or some were cut off."""
        prompt, sent = self._prompt_of(number), self._body.prompt
        if self._body.truncate_prompt_tokens is None:
            if isinstance(sent, str):
                return sent
            if isinstance(sent[prompt], str):
                return str(sent[prompt])
        return self._service.tokenizer.decode(self._prompt(number), skip_special_tokens=False)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._service.answering(self._body.model),
            system_fingerprint=self._service.fingerprint,
            choices=choices,
            usage=usage,
        )

    def chunk(self, pieces: list[Piece]) -> bytes:
        """The events of one step."""
        self._take(pieces)
        events = []
        for piece in pieces:
            state = self._states[piece.choice]
            wanted = piece.text or piece.finish_reason or (piece.tokens and self._per_token)
            if not wanted and not (self._body.echo and not state.begun):
                continue
            choice = self._choice(piece.choice, state, piece)
            usage: Usage | UnsetType | None = None if self._usage_at_end else UNSET
            if self._usage_always:
                usage = self._usage()
            events.append(event(self._completion([choice], usage)))
        return b"".join(events)

    @property
    def _per_token(self) -> bool:
        """Tokens count even while they have no text yet."""
        return self._body.logprobs is not None or bool(self._body.return_token_ids)

    def tail(self) -> bytes:
        """What follows the last choice: usage, if asked for."""
        return event(self._completion([], self._usage())) if self._usage_at_end else b""

    def _usage(self) -> Usage:
        usage = self._generation.usage()
        if self._echo_only:
            usage.total_tokens, usage.completion_tokens = usage.prompt_tokens, 0
        return usage

    def add(self, pieces: list[Piece]) -> None:
        """Collect for `reply`."""
        self._take(pieces)
        for piece in pieces:
            state = self._states[piece.choice]
            state.text.append(piece.text)
            state.tokens += piece.tokens
            state.logprobs += piece.logprobs
            if piece.finish_reason is not None:
                state.finish_reason, state.stop_reason = piece.finish_reason, piece.stop_reason

    def reply(self) -> bytes:
        """The whole response."""
        choices = []
        for number, state in enumerate(self._states):
            logprobs = [item for item in state.logprobs if not isinstance(item, int)]
            whole = Piece(number, "".join(state.text), state.tokens, logprobs, None)
            whole.finish_reason, whole.stop_reason = state.finish_reason, state.stop_reason
            choice = self._choice(number, state, whole)
            choice.prompt_logprobs = self._prompt_rows(number)
            choices.append(choice)
        return msgspec.json.encode(self._completion(choices, self._usage()))

    def _prompt_rows(self, number: int) -> PromptLogprobs | UnsetType:
        count = self._body.prompt_logprobs
        if count is None:
            return UNSET
        found = self._prompt_logprobs.get(self._prompt_of(number), [])
        return self._logprobs.prompt(self._prompt(number), found, count)
