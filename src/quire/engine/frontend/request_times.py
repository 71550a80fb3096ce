"""What happened to a sequence, as metrics, replies, logs and traces tell it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from quire.core.request import FinishReason, SequenceReport, span


class SequenceClock(SequenceReport, eq=False):
    """When one sequence was received, gave tokens, and how many, beside what the engine says of it; seconds of
    `time.monotonic`. `first`, `last`: when its tokens reached the edge."""

    arrival: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    def cut(self, reason: FinishReason) -> None:
        """The edge ended it: the engine's account goes on until the last token that came."""
        self.finish_reason = reason
        if self.timing is not None:
            self.timing = replace(self.timing, last_token=max(self.last, self.timing.last_token))


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a request went, in seconds; null: that never happened.

    Of several sequences the earliest beginnings and the latest end count, and all tokens and preemptions.
    `generated_tokens` are the engine's, also those behind a stop string. `engine_restarts`: while it was in flight.
    """

    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    ttft_seconds: float | None
    e2e_seconds: float | None
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    engine_restarts: int


def timings(clocks: Sequence[SequenceClock], prompt_tokens: int) -> Timings:
    """Timings of sequences that were received together: queue = received to first scheduled, prefill = from there to
    the first token, decode = from there to the last, TTFT and E2E = received to first and last token at the edge."""
    scheduled, first, last = span(clocks)
    arrival = min((clock.arrival for clock in clocks), default=0.0)
    return Timings(
        queue_seconds=_between(arrival, scheduled),
        prefill_seconds=_between(scheduled, first),
        decode_seconds=_between(first, last),
        ttft_seconds=_between(arrival, min((clock.first for clock in clocks if clock.tokens), default=0.0)),
        e2e_seconds=_between(arrival, max((clock.last for clock in clocks), default=0.0)),
        prompt_tokens=prompt_tokens,
        generated_tokens=sum(clock.tokens for clock in clocks),
        preemptions=sum(clock.preemptions for clock in clocks),
        engine_restarts=max((clock.restarts for clock in clocks), default=0),
    )


class Moments(msgspec.Struct, frozen=True, kw_only=True):
    """When each thing happened to a request, in seconds of the server's monotonic clock; null: that never was.

    `received`: its head had been read; `admitted`: first scheduled; `first_token`, `last_token`: the engine had them;
    `told`: this was written. A client that knows when it sent and when it read this estimates the offset of the clocks.
    """

    received: float
    admitted: float | None
    first_token: float | None
    last_token: float | None
    told: float


def moments(clocks: Sequence[SequenceClock], received: float, told: float) -> Moments:
    """Moments of sequences that were received together: the earliest beginnings, the latest end."""
    admitted, first, last = (moment or None for moment in span(clocks))
    return Moments(received=received, admitted=admitted, first_token=first, last_token=last, told=told)


def _between(start: float, end: float) -> float | None:
    """Seconds to the microsecond; None where either never was."""
    return round(end - start, 6) if start and end else None
