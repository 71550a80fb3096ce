"""Pieces of text out of engine outputs: the part that completions and chat share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
from msgspec import UNSET

from quire.core.request import Miss, Output, Request, TokenLogprob
from quire.engine.frontend.async_engine import AsyncEngine
from quire.engine.frontend.request_times import Moments, Timings, moments, timings
from quire.engine.outputs import Continuation
from quire.engine.requests import continued
from quire.server.text_generation.reports import CacheReport, CompletionTokens, Usage, details
from quire.text.detokenizer import OutputText
from quire.text.structured.answer_checks import NO_CHECKS, AnswerChecks
from quire.text.tokenizer import Tokenizer

TURN = 32
"""Prompts, or pieces of text, that are worked on before other requests have their turn."""


@dataclass(slots=True)
class Piece:
    """What one choice gained. `stop_reason` is the stop string or stop token, None for the model's own end token."""

    choice: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob] | None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def empty(self) -> bool:
        """Nothing in it is worth a chunk."""
        return not self.text and not self.tokens and self.finish_reason is None


class _Choice(Continuation):
    """One sequence by its number, and what it said where that is to be checked."""

    number: int = 0
    said: list[str] = msgspec.field(default_factory=list)


class Generated(Protocol):
    """Choices of one HTTP request as they come, and what is said of them."""

    requests: Sequence[Request]
    checks: AnswerChecks

    @property
    def count(self) -> int: ...

    def pieces(self) -> AsyncIterator[list[Piece]]: ...

    def usage(self, choice: int | None = None) -> Usage: ...

    def timings(self, request: Request | None = None) -> Timings: ...

    def cache(self, request: Request) -> CacheReport: ...

    def moments(self, request: Request, received: float, told: float) -> Moments: ...

    @property
    def finish_reasons(self) -> list[str | None]: ...

    def finish_reasons_of(self, request: Request) -> list[str | None]: ...

    def text(self, choice: int) -> str: ...

    def close(self) -> None: ...


class Generation:
    """All choices of one HTTP request: `len(requests)` prompts times `n`, numbered prompt by prompt.

    Submits on construction, so that a full queue is refused before the first byte of a response; `close` must follow.
    `each`: a piece has at most one token. `shown`: special tokens that are text. `checks`: by which texts are checked,
    which are kept for that.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        each: bool = False,
        shown: frozenset[int] = frozenset(),
        checks: AnswerChecks = NO_CHECKS,
    ) -> None:
        self.requests, self.checks = requests, checks
        self._each = each
        self._stream = engine.submit(requests)
        self._choices: dict[tuple[str, int], _Choice] = {}
        for request in requests:
            begin = partial(_begin, engine, tokenizer, request, shown)
            for index in range(request.params.n):
                self._choices[request.id, index] = _Choice(begin, number=len(self._choices))

    @property
    def count(self) -> int:
        """Choices in all."""
        return len(self._choices)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What is new, whenever there is something; ends after every choice's finish reason."""
        while outputs := await self._stream.next():
            if self._each:
                outputs = [part for output in outputs for part in _apart(output)]
            for at in range(0, len(outputs), TURN):
                if at:
                    await asyncio.sleep(0)  # others have their turn
                pieces = [self._push(output) for output in outputs[at : at + TURN]]
                yield [piece for piece in pieces if piece is not None]

    def _push(self, output: Output) -> Piece | None:
        choice = self._choices[output.request_id, output.index]
        growth = choice.push(output)
        if growth is None:
            return None
        text, used, finish_reason, stop_reason = growth
        if self.checks and text:
            choice.said.append(text)
        if choice.done and output.finish_reason is None:
            self._stream.stop(output.request_id, output.index)
        tokens, logprobs = output.tokens[:used], output.logprobs[:used]
        return Piece(choice.number, text, tokens, logprobs, output.prompt_logprobs, finish_reason, stop_reason)

    def usage(self, choice: int | None = None) -> Usage:
        """Tokens so far, of all choices or of one; a prompt counts once for its `n` choices."""
        done = [c for c in self._choices.values() if choice in (None, c.number)]
        used = {key[0] for key, c in self._choices.items() if choice in (None, c.number)}
        prompt = sum(len(r.prompt) for r in self.requests if r.id in used)
        written, drafted, accepted = (sum(getattr(c, name) for c in done) for name in ("tokens", "drafted", "accepted"))
        guessed = CompletionTokens(accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=written,
            total_tokens=prompt + written,
            prompt_tokens_details=details(
                sum(self._first(i).cached_tokens for i in used), [r for r in self.requests if r.id in used]
            ),
            completion_tokens_details=guessed if drafted else UNSET,
        )

    def _first(self, request_id: str) -> _Choice:
        """The sequence that knows what was found of a request's prompt: the others fork from it."""
        return self._choices[request_id, 0]

    def timings(self, request: Request | None = None) -> Timings:
        """Where the time of a request, or of all, went so far."""
        asked = self.requests if request is None else (request,)
        clocks = [clock for each in asked for clock in self._stream.clocks(each.id)]
        return timings(clocks, sum(len(each.prompt) for each in asked))

    def moments(self, request: Request, received: float, told: float) -> Moments:
        """When each thing happened to a request."""
        return moments(self._stream.clocks(request.id), received, told)

    def cache(self, request: Request) -> CacheReport:
        """What the prefix cache had of a prompt."""
        first, prompt = self._first(request.id), len(request.prompt)
        hit, miss = first.cached_tokens, first.miss or Miss(0, "not_cached")
        return CacheReport(prompt_tokens=prompt, hit_tokens=hit, first_miss=miss if hit < prompt - 1 else None)

    @property
    def finish_reasons(self) -> list[str | None]:
        """Why each choice ended, if it did."""
        return [reason for request in self.requests for reason in self.finish_reasons_of(request)]

    def finish_reasons_of(self, request: Request) -> list[str | None]:
        """Reasons why one prompt's choices ended."""
        return [clock.finish_reason for clock in self._stream.clocks(request.id)]

    def text(self, choice: int) -> str:
        """What a choice said, where it is to be checked."""
        return "".join(next(each.said for each in self._choices.values() if each.number == choice))

    def close(self) -> None:
        """Abort what has not finished; idempotent."""
        self._stream.close()


def _begin(engine: AsyncEngine, tokenizer: Tokenizer, request: Request, shown: frozenset[int]) -> OutputText:
    return OutputText(tokenizer, request.params, shown, continued(engine.info, request.prompt))


def _apart(output: Output) -> list[Output]:
    """One for each token; what is said once of all comes with the last."""
    count = len(output.tokens)
    if count < 2:
        return [output]
    parts = [
        Output(request_id=output.request_id, index=output.index, tokens=[token], logprobs=output.logprobs[i : i + 1])
        for i, token in enumerate(output.tokens[:-1])
    ]
    return [*parts, msgspec.structs.replace(output, tokens=output.tokens[-1:], logprobs=output.logprobs[count - 1 :])]
