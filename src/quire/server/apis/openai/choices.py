"""Choices as a client reads them: one reply, or a stream of chunks; the APIs differ in a few shapes."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from quire.core.request import Request, TokenLogprob
from quire.server.apis.answer import Answer
from quire.server.apis.openai.logprobs import LogprobWriter, weight
from quire.server.apis.openai.protocol import QuireOptions, SamplingFields
from quire.server.apis.openai.replies import ChatCompletion, ChatCompletionChunk, Completion, PromptLogprobs
from quire.server.apis.openai.sampling_params import drawn, new_id
from quire.server.http.body import LARGE, off_loop
from quire.server.http.json_parts import encode
from quire.server.http.sse import event
from quire.server.service import Service
from quire.server.text_generation.generation import Generated, Piece
from quire.server.text_generation.reports import PromptReport, Report, Usage, llama_cpp_timings
from quire.text.detokenizer import Offsets

Body = TypeVar("Body", bound=SamplingFields)
Choices = list[Any]
Reply = Completion | ChatCompletion | ChatCompletionChunk
TOKEN_BYTES = 4
"""Of text, about."""
CHOICE_BYTES = 256
"""Of text, which what is said of each choice takes as long as."""


@dataclass(slots=True)
class State:
    """What one choice has collected. `begun`: something of it was written; `offsets`: where tokens are in the text."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    begun: bool = False
    offsets: Offsets | None = None

    def add(self, piece: Piece) -> None:
        """Keep `piece` for the reply."""
        self.text.append(piece.text)
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason

    @property
    def likelihood(self) -> float:
        """The mean log-probability of its tokens, in nats."""
        return sum(each.logprob for each in self.logprobs) / max(1, len(self.logprobs))

    def whole(self, choice: int) -> Piece:
        """All pieces as one."""
        text = "".join(self.text)
        return Piece(choice, text, self.tokens, self.logprobs, None, self.finish_reason, self.stop_reason)


class ChoicesAnswer(Answer, Generic[Body]):
    """Pieces -> chunks, or one reply. `facts`: what each of an answer's messages says of it.

    `scored`: log-probabilities were asked for; then, as with ids, a token counts while it has no text yet.
    """

    prefix: ClassVar[str]

    def __init__(self, service: Service, body: Body, generation: Generated, scored: bool) -> None:
        super().__init__(service, generation, service.answering(body.model), bool(body.stream))
        self.body = body
        self.logprobs = LogprobWriter(service.tokenizer, bool(body.return_tokens_as_token_ids))
        self.with_ids = bool(body.return_token_ids)
        self.facts: dict[str, Any] = {
            "id": new_id(self.prefix, body),
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": service.fingerprint,
        }
        self.prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        self.per_token = scored or self.with_ids
        self._states = [State() for _ in range(generation.count)]
        options = body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.include_usage and options.continuous_usage_stats)

    @abstractmethod
    def part(self, state: State, piece: Piece) -> msgspec.Struct | None:
        """The choice of a chunk; None where the piece says nothing."""

    @abstractmethod
    def whole(self, state: State, piece: Piece) -> Any:
        """A choice of the reply."""

    @abstractmethod
    def chunk_of(self, choices: Choices, usage: Usage | UnsetType | None) -> Reply:
        """One event of the stream."""

    @abstractmethod
    def reply_of(self, choices: Choices, usage: Usage) -> Reply:
        """The reply."""

    def opens(self, state: State) -> bool:
        """Whether the first chunk of a choice says something that is not in its piece."""
        return False

    def take(self, pieces: list[Piece]) -> None:
        """Note prompt log-probabilities before any choice is written: all `n` choices of a prompt show them."""
        for piece in pieces:
            if piece.prompt_logprobs:
                self.prompt_logprobs.setdefault(self.prompt_of(piece.choice), piece.prompt_logprobs)

    def usage(self) -> Usage:
        """Tokens so far."""
        return self.generation.usage()

    def prompt_of(self, choice: int) -> int:
        """The number of a choice's prompt."""
        return choice // drawn(self.body)

    def prompt(self, choice: int) -> Sequence[int]:
        """The tokens that a choice continues, as replies have them."""
        return self.service.media.shown(self.generation.requests[self.prompt_of(choice)])

    def prompt_rows(self, choice: int) -> PromptLogprobs | UnsetType:
        """Log-probabilities of a choice's prompt, if they were asked for."""
        count = self.body.prompt_logprobs
        if count is None:
            return UNSET
        return self.logprobs.prompt(self.prompt(choice), self.prompt_logprobs.get(self.prompt_of(choice), []), count)

    async def events(self, pieces: list[Piece]) -> bytes:
        """The events of one step; much text, as with a prompt's log-probabilities, is written in a thread."""
        self.take(pieces)
        size = sum(self._weight(p.choice, p.logprobs, self.opens(self._states[p.choice])) for p in pieces)
        return await off_loop(size, self._events, pieces, size > LARGE)

    def _events(self, pieces: list[Piece], large: bool) -> bytes:
        events = []
        for piece in pieces:
            state = self._states[piece.choice]
            said = piece.text or piece.finish_reason or (piece.tokens and self.per_token)
            if not said and not self.opens(state):
                continue
            if (part := self.part(state, piece)) is None:
                continue
            usage: Usage | UnsetType | None = None if self._usage_at_end else UNSET
            if self._usage_always:
                usage = self.usage()
            events.append(event(self._timed(self.chunk_of([part], usage)), large))
            state.begun = True
        return b"".join(events)

    def tail(self) -> bytes:
        """What follows the last choice: usage and a report, if asked for."""
        if not self._usage_at_end and self.body.quire is None and not self.schema_errors:
            return b""
        return event(self._reported(self.chunk_of([], self.usage() if self._usage_at_end else UNSET)))

    def add(self, pieces: list[Piece]) -> None:
        """Collect for `reply`."""
        self.take(pieces)
        for piece in pieces:
            self._states[piece.choice].add(piece)

    async def reply(self) -> list[bytes]:
        """The whole response, in parts; a large one is written in a thread."""
        shows = bool(self.prompt_logprobs) or self.opens(State())
        size = sum(CHOICE_BYTES + self._weight(i, state.logprobs, shows) for i, state in enumerate(self._states))
        return await off_loop(size, self._reply)

    def _weight(self, choice: int, logprobs: list[TokenLogprob], shows_prompt: bool) -> int:
        """Bytes, about, of a choice's log-probabilities, and of what is said of its prompt."""
        if not shows_prompt:
            return weight(logprobs)
        found = self.prompt_logprobs.get(self.prompt_of(choice), ())
        return weight(logprobs) + weight(found) + TOKEN_BYTES * len(self.prompt(choice))

    def _reply(self) -> list[bytes]:
        kept = self._kept()
        choices = [self.whole(self._states[number], self._states[number].whole(number)) for number in kept]
        self.schema_errors = [
            msgspec.structs.replace(each, choice=kept.index(each.choice))
            for each in self.schema_errors
            if each.choice in kept
        ]
        if len(choices) < len(self._states):
            for index, choice in enumerate(choices):
                choice.index = index
        return encode(self._reported(self.reply_of(choices, self.usage())))

    def _kept(self) -> list[int]:
        """The choices that are sent: of each prompt's the `n` with the highest mean log-probability of a token."""
        made, n = drawn(self.body), self.body.n or 1
        numbers = range(len(self._states))
        if made == n or self.generation.count < made:
            return list(numbers)
        groups = [numbers[at : at + made] for at in range(0, len(numbers), made)]
        return [i for group in groups for i in sorted(group, key=lambda i: -self._states[i].likelihood)[:n]]

    def _timed(self, reply: Reply) -> Reply:
        """Add the times so far, where they are asked for."""
        if self.body.timings_per_token:
            reply.timings = llama_cpp_timings(self.generation.usage(), self.generation.timings())
        return reply

    def _reported(self, reply: Reply) -> Reply:
        """Add what the body's `quire` asks for, and what schemas do not allow."""
        reply = self._timed(reply)
        if self.body.quire is not None:
            reply.quire = report(self.request_id, self.began, self.generation, self.body.quire)
        if self.schema_errors:
            told = reply.quire if isinstance(reply.quire, Report) else Report(request_id=self.request_id)
            reply.quire = msgspec.structs.replace(told, schema_errors=self.schema_errors)
        return reply


def report(request_id: str, began: float, generation: Generated, asked: QuireOptions) -> Report:
    """What is known of all prompts of a request over HTTP, as far as it was `asked` for.

    `began`: when its head had been read, of `time.monotonic`.
    """

    def of(request: Request) -> PromptReport:
        return PromptReport(
            id=request.id,
            timings=generation.timings(request) if asked.timings else UNSET,
            cache=generation.cache(request) if asked.cache else UNSET,
            clock=generation.moments(request, began, time.monotonic()) if asked.clock else UNSET,
        )

    prompts = [of(request) for request in generation.requests]
    if len(prompts) > 1:
        return Report(request_id=request_id, prompts=prompts)
    one = prompts[0]
    return Report(request_id=request_id, id=one.id, timings=one.timings, cache=one.cache, clock=one.clock)
