"""Beam search (Graves 2012; Sutskever et al. 2014) on one-token requests: beams share their prefix in the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from quire.core.options.ranges import check_ranges, within
from quire.core.params import MAX_LOGPROBS, MaxTokens

MAX_BEAMS = MAX_LOGPROBS // 2
"""A step asks for twice as many tokens of each beam."""
BeamWidth = Annotated[int, within(ge=1, le=MAX_BEAMS)]
LengthPenalty = Annotated[float, within(ge=-10, le=10)]
"""The power of any length is a float up to there."""
Tails = list[list[tuple[int, float]]]
Step = Callable[[list[tuple[int, ...]]], Tails]
"""Token rows -> for each row the likeliest next tokens with their log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Beams are ranked by log-probability / length^`length_penalty` (length in generated tokens; > 0 favours long).

    `early_stopping`: end with the `beam_width`-th beam that ended, though one that goes on might yet be better.
    """

    beam_width: BeamWidth
    max_tokens: MaxTokens
    length_penalty: LengthPenalty = 1.0
    ignore_eos: bool = False
    early_stopping: bool = False

    def validate(self) -> None:
        """`BadRequest` naming the field that is out of range."""
        check_ranges(self)


class Beam(NamedTuple):
    """Generated tokens (without the prompt) and the sum of their log-probabilities."""

    tokens: tuple[int, ...]
    logprob: float
    ended: bool = False

    def score(self, length_penalty: float) -> float:
        """What beams are ranked by."""
        return float(self.logprob / max(1, len(self.tokens)) ** length_penalty)


@dataclass(frozen=True)
class BeamSearchSequence:
    """One finished beam. `tokens` are prompt and continuation, `text` is the continuation's."""

    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: str


@dataclass(frozen=True)
class BeamSearchOutput:
    """The best `beam_width` sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class _Search:
    """The search over one prompt; at most `limit` tokens follow it."""

    prompt: tuple[int, ...]
    limit: int
    live: list[Beam] = field(default_factory=lambda: [Beam((), 0.0)])
    ended: list[Beam] = field(default_factory=list)

    def advance(self, tails: list[list[tuple[int, float]]], params: BeamSearchParams, eos: Sequence[int]) -> None:
        """Grow every live beam by its candidates; keep the best, set those aside that ended."""
        grown: list[Beam] = []
        for beam, tail in zip(self.live, tails, strict=True):
            for token, logprob in tail:
                ends = token in eos and not params.ignore_eos
                new = Beam((*beam.tokens, token), beam.logprob + logprob, ends)
                (self.ended if ends else grown).append(new)
        grown.sort(key=lambda b: -b.logprob)
        self.live = grown[: params.beam_width]
        self.ended.sort(key=lambda b: -b.score(params.length_penalty))
        del self.ended[params.beam_width :]
        if params.early_stopping and len(self.ended) >= params.beam_width:
            self.live = []
        if self.live and (len(self.live[0].tokens) >= self.limit or self._decided(params)):
            self.ended = sorted([*self.ended, *self.live], key=lambda b: -b.score(params.length_penalty))
            del self.ended[params.beam_width :]
            self.live = []

    def _decided(self, params: BeamSearchParams) -> bool:
        """Whether no live beam can still enter the result: log-probabilities only fall, lengths only grow."""
        if len(self.ended) < params.beam_width:
            return False
        best = self.live[0]
        longest = self.limit if params.length_penalty > 0 else len(best.tokens)
        bound = best.logprob / longest**params.length_penalty
        return bool(self.ended[-1].score(params.length_penalty) >= bound)


def search(
    prompts: Sequence[Sequence[int]], limits: Sequence[int], params: BeamSearchParams, eos: Sequence[int], step: Step
) -> list[list[Beam]]:
    """The best `beam_width` beams of every prompt, best first; at most `limits[i]` tokens follow prompt i.

    All beams of all prompts advance in one `step`, so that they share batches.
    """
    going = searching(prompts, limits, params, eos)
    rows: list[tuple[int, ...]] | None = next(going, None)
    found: list[list[Beam]] = []
    while rows is not None:
        tails, rows = step(rows), None
        try:
            rows = going.send(tails)
        except StopIteration as end:
            found = end.value
    return found


def searching(
    prompts: Sequence[Sequence[int]], limits: Sequence[int], params: BeamSearchParams, eos: Sequence[int]
) -> Generator[list[tuple[int, ...]], Tails, list[list[Beam]]]:
    """`search` for whoever has the next tokens otherwise: gives rows of tokens, and is sent what may follow each."""
    searches = [_Search(tuple(p), min(params.max_tokens, limit)) for p, limit in zip(prompts, limits, strict=True)]
    while live := [s for s in searches if s.live]:
        sent = yield [s.prompt + beam.tokens for s in live for beam in s.live]
        tails = iter(sent)
        for each in live:
            each.advance([next(tails) for _ in each.live], params, eos)
    return [s.ended for s in searches]
