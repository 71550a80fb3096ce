"""Clocks of client and server joined per request: where the time of each went.

The offset between the clocks is NTP's estimate (Mills, RFC 5905): a request was sent at t0 (client), received at t1
(server), its account was written at t2 (server) and read at t3 (client), so the server is ahead by
((t1 - t0) + (t2 - t3)) / 2, wrong by half of what the ways there and back differ. Ways that took least differ least:
of the requests around each, the one with the shortest round trip (t3 - t0) - (t2 - t1) tells, so drift matters little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.bench.records import Moments, Record, milliseconds

WINDOW = 30.0
"""Seconds before and after a request: quartz of 50 ppm drifts 1.5 ms in that time."""
PARTS = ("wait", "client", "way there", "queue", "prefill", "way back", "decode", "tail")
"""In order of time: due to free to send, to sent, to received, to admitted, to first token, to first chunk; then the
engine's first to last token, and its last token to the last chunk."""
SLOWEST = 0.01


@dataclass(frozen=True, slots=True)
class Sample:
    """What one request says of the clocks, in seconds: when (client), offset (server - client), round trip."""

    at: float
    offset: float
    trip: float


def sample(record: Record, moments: Moments) -> Sample:
    """Sample of a request whose account came."""
    offset = ((moments.received - record.sent) + (moments.told - moments.heard)) / 2
    trip = (moments.heard - record.sent) - (moments.told - moments.received)
    return Sample(record.sent, offset, trip)


def best(samples: Sequence[Sample], window: float = WINDOW) -> list[Sample]:
    """Choose for each of `samples`, which are in order of time, the one within `window` of it with the least round
    trip."""
    found: list[Sample] = []
    least: deque[Sample] = deque()  # of those in the window, trips ascending: a sliding minimum
    ahead = 0
    for each in samples:
        while ahead < len(samples) and samples[ahead].at <= each.at + window:
            while least and least[-1].trip >= samples[ahead].trip:
                least.pop()
            least.append(samples[ahead])
            ahead += 1
        while least[0].at < each.at - window:
            least.popleft()
        found.append(least[0])
    return found


def parts(record: Record, moments: Moments, offset: float) -> dict[str, float] | None:
    """Seconds of each of `PARTS`; None where the server does not know all of its times.

    Up to the first chunk they sum to TTFT from the due time; `decode` and `tail` begin at the engine's first token.
    """
    admitted, first, last = moments.admitted, moments.first_token, moments.last_token
    if admitted is None or first is None or last is None:
        return None
    ready = record.intended if record.ready is None else record.ready
    return {
        "wait": ready - record.intended,
        "client": record.sent - ready,
        "way there": moments.received - offset - record.sent,
        "queue": admitted - moments.received,
        "prefill": first - admitted,
        "way back": record.chunks[0] - (first - offset),
        "decode": last - first,
        "tail": record.chunks[-1] - (last - offset),
    }


@dataclass(frozen=True)
class JoinedClocks:
    """Requests whose clocks were joined: record -> its parts, in seconds; and what was found of the clocks."""

    found: list[tuple[Record, dict[str, float]]]
    offset: float
    trip: float
    drift: float

    def values(self) -> dict[str, list[float]]:
        """Seconds of the figures `queue`, `prefill`, `decode`, `network` and `client` of METRICS."""
        each = [part for _, part in self.found]
        plain = {name: [part[name] for part in each] for name in ("queue", "prefill", "decode", "client")}
        return plain | {"network": [part["way there"] + part["way back"] for part in each]}

    def results(self) -> dict[str, Any]:
        """Results for the report: milliseconds of each part over all, and its mean over the slowest hundredth by
        TTFT."""
        slow = sorted(self.found, key=lambda pair: -(pair[0].ttft + pair[0].late))
        slow = slow[: max(1, round(SLOWEST * len(slow)))]
        return {
            "requests": len(self.found),
            "offset_ms": 1e3 * self.offset,
            "least_round_trip_ms": 1e3 * self.trip,
            "offset_change_ms": 1e3 * self.drift,
            "parts_ms": {name: milliseconds(part[name] for _, part in self.found) for name in PARTS},
            "slowest_requests": len(slow),
            "slowest_mean_ms": {name: 1e3 * sum(part[name] for _, part in slow) / len(slow) for name in PARTS},
        }


def join(records: Sequence[Record]) -> JoinedClocks | None:
    """Join the clocks of those that were answered with an account; None where no request was."""
    told = sorted((r for r in records if r.ok and r.moments is not None), key=lambda r: r.sent)
    if not told:
        return None
    samples = [sample(r, r.moments) for r in told if r.moments is not None]
    chosen = best(samples)
    found = []
    for record, each in zip(told, chosen, strict=True):
        assert record.moments is not None
        if (part := parts(record, record.moments, each.offset)) is not None:
            found.append((record, part))
    if not found:
        return None
    surest = min(chosen, key=lambda each: each.trip)
    return JoinedClocks(found, surest.offset, surest.trip, chosen[-1].offset - chosen[0].offset)
