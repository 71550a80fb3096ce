"""What `LLM` returns, and the builder that grows it from engine outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from quire.core.request import Output, Request, SequenceReport, TokenLogprob, span
from quire.text.detokenizer import Growth, OutputText
from quire.text.structured.answer_checks import AnswerChecks
from quire.text.structured.schema_checker import SchemaError
from quire.text.tokenizer import Tokenizer


class Continuation(SequenceReport, eq=False):
    """What came of a sequence: `tokens` of its text, which `begin` makes when there is something to read (many wait for
    long), and what the engine says beside. `done`: the text has ended."""

    begin: Callable[[], OutputText]
    text: OutputText | None = None
    tokens: int = 0
    done: bool = False

    def push(self, output: Output) -> Growth | None:
        """What the next output adds; None behind the end of the text, which a stop string may end before the engine
        knows."""
        if self.done:
            return None
        self.note(output)
        if self.text is None:
            self.text = self.begin()
        growth = self.text.push(output)
        self.tokens += growth.used
        self.done = growth.finish_reason is not None
        return growth


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability (nats) of a token, its 1-based rank, and its text if detokenized."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds of `time.monotonic`. With n > 1: the earliest start and the latest end. None = never happened."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    preemptions: int = 0

    @property
    def time_in_queue(self) -> float | None:
        """Arrival to first scheduled."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def ttft(self) -> float | None:
        """Arrival to first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def e2e_latency(self) -> float | None:
        """Arrival to last token."""
        return None if self.last_token_time is None else self.last_token_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """A completion: one of the `n` continuations. `stop_reason`: the stop string or stop token, None for the model's
    own end token.

    `token_ids` and `logprobs` include a token that ended the text; `text` does not, unless that was asked for.
    `schema_errors`: what the JSON schema that was asked for does not allow, where a grammar could not hold all of it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    schema_errors: list[SchemaError] = field(default_factory=list)


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt. `prompt_logprobs[0]` is None: nothing predicts the first token.

    `num_draft_tokens` were guessed ahead, of which `num_accepted_tokens` were kept.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    metrics: RequestMetrics


class RequestBuilder:
    """Collects the outputs of one request. `text` is the prompt's text where there was one.

    `prompt`: the tokens that the output continues; `shown`: the ids of a prompt with images, as the vocabulary knows
    them. `checks`: by which texts are checked. `special`: special tokens that are text although others are skipped.
    """

    def __init__(
        self,
        request: Request,
        text: str | None,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        shown: list[int] | None = None,
        checks: AnswerChecks | None = None,
        special: frozenset[int] = frozenset(),
    ) -> None:
        self.request, self._checks = request, checks
        self._text, self._shown = text, shown
        self._tokenizer = tokenizer if request.params.detokenize else None
        want = request.params.logprobs is not None
        self.outputs = [
            CompletionOutput(index=i, cumulative_logprob=0.0 if want else None, logprobs=[] if want else None)
            for i in range(request.params.n)
        ]
        begin = partial(OutputText, self._tokenizer, request.params, special, prompt)
        self._parts = [Continuation(begin) for _ in self.outputs]
        self._live = len(self._parts)
        self._prompt_logprobs: list[TokenLogprob] = []
        self._first: float | None = None
        self._last: float | None = None

    @property
    def finished(self) -> bool:
        """Whether all `n` continuations have ended."""
        return not self._live

    def push(self, output: Output) -> str:
        """Take new tokens of one continuation; returns the text they add."""
        growth = self._parts[output.index].push(output)
        if growth is None:
            return ""
        target, (text, used, reason, stop) = self.outputs[output.index], growth
        if output.prompt_logprobs:
            self._prompt_logprobs = output.prompt_logprobs
        if output.tokens:
            self._last = time.monotonic()
            self._first = self._first or self._last
        target.text += text
        target.token_ids += output.tokens[:used]
        target.finish_reason, target.stop_reason = reason, stop
        self._live -= reason is not None
        if output.logprobs:
            self._add_logprobs(target, output.logprobs[:used])
        return text

    def _add_logprobs(self, target: CompletionOutput, logprobs: Sequence[TokenLogprob]) -> None:
        if target.logprobs is None or target.cumulative_logprob is None:
            return
        for entry in logprobs:
            target.logprobs.append(self._named(entry))
            target.cumulative_logprob += entry.logprob

    def _named(self, entry: TokenLogprob) -> dict[int, Logprob]:
        """The token itself first, then the likeliest ones."""
        tokenizer = self._tokenizer

        def text(token: int) -> str | None:
            return tokenizer.id_to_text(token) if tokenizer is not None else None

        best = {t: Logprob(value, rank, text(t)) for rank, (t, value) in enumerate(entry.top, 1)}
        return {entry.token: Logprob(entry.logprob, entry.rank, text(entry.token))} | best

    def result(self) -> RequestOutput:
        """The answer so far, checked where it is whole."""
        if self._checks is not None and self._checks and self.finished:
            for each in self.outputs:
                each.schema_errors = self._checks.errors(each.text, choice=each.index)
        scored = self.request.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request.id,
            prompt=self._text,
            prompt_token_ids=list(self.request.prompt) if self._shown is None else self._shown,
            prompt_logprobs=[None, *map(self._named, self._prompt_logprobs)] if scored else None,
            outputs=self.outputs,
            finished=self.finished,
            num_cached_tokens=self._parts[0].cached_tokens,  # the others fork from it, and count its prompt as found
            num_draft_tokens=sum(part.drafted for part in self._parts),
            num_accepted_tokens=sum(part.accepted for part in self._parts),
            metrics=self._metrics(),
        )

    def _metrics(self) -> RequestMetrics:
        """The engine's clock where it told; a text that a stop string ended has only ours."""
        scheduled, first, last = span(self._parts)
        return RequestMetrics(
            arrival_time=self.request.arrival,
            first_scheduled_time=scheduled or None,
            first_token_time=first or self._first,
            last_token_time=last or self._last,
            preemptions=sum(part.preemptions for part in self._parts),
        )
