"""What is measured of one request, and how many of them become figures.

TTFT = first chunk - send. TPOT = (E2E - TTFT) / (n - 1). ITL = pooled gaps between chunks. E2E = last chunk - send.
The same from the intended send time counts the wait that a slow server causes its own clients (coordinated omission).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

DEFINITIONS = {
    "dialect": "vLLM's names and formulas; GuideLLM's time_per_output_token includes TTFT, AIPerf's ITL is this TPOT",
    "ttft": "first chunk - send",
    "tpot": "(e2e - ttft) / (output tokens - 1), one value per request",
    "itl": "gaps between consecutive chunks, pooled over all requests",
    "e2e": "last chunk - send",
    "from_intended": "the same, counted from when the request was due",
    "total throughput": "(input + output tokens) / duration",
}


@dataclass(slots=True)
class Record:
    """Times in seconds of one clock. `chunks`: when tokens arrived; `output_tokens` may be more than chunks."""

    intended: float
    sent: float = 0.0
    chunks: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it was answered."""
        return self.error is None and bool(self.chunks)

    @property
    def ttft(self) -> float:
        """Send to first chunk."""
        return self.chunks[0] - self.sent

    @property
    def e2e(self) -> float:
        """Send to last chunk."""
        return self.chunks[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None for a single token."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Between consecutive chunks."""
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def late(self) -> float:
        """How long after its due time it was sent."""
        return self.sent - self.intended


def milliseconds(values: Iterable[float]) -> dict[str, float] | None:
    """Mean and percentiles (linear interpolation) of seconds, in milliseconds; None of nothing."""
    found = 1e3 * np.fromiter(values, float)
    if not len(found):
        return None
    p50, p90, p95, p99 = np.percentile(found, (50, 90, 95, 99)).tolist()
    ends = {"min": float(found.min()), "max": float(found.max())}
    return {"mean": float(found.mean()), "p50": p50, "p90": p90, "p95": p95, "p99": p99, **ends}


def latencies(records: Sequence[Record]) -> dict[str, dict[str, float] | None]:
    """The four latencies over all answered requests."""
    good = [r for r in records if r.ok]
    return {
        "ttft": milliseconds(r.ttft for r in good),
        "tpot": milliseconds(r.tpot for r in good if r.tpot is not None),
        "itl": milliseconds(gap for r in good for gap in r.gaps),
        "e2e": milliseconds(r.e2e for r in good),
    }


def from_intended(records: Sequence[Record]) -> dict[str, dict[str, float] | None]:
    """TTFT and E2E counted from when each request was due."""
    good = [r for r in records if r.ok]
    return {
        "ttft": milliseconds(r.ttft + r.late for r in good),
        "e2e": milliseconds(r.e2e + r.late for r in good),
    }


def rates(records: Sequence[Record], seconds: float) -> dict[str, float]:
    """Requests and tokens per time."""
    good = [r for r in records if r.ok]
    read, written = sum(r.input_tokens for r in good), sum(r.output_tokens for r in good)
    return {
        "duration_s": seconds,
        "completed": len(good),
        "failed": len(records) - len(good),
        "input_tokens": read,
        "output_tokens": written,
        "requests_per_minute": 60 * len(good) / seconds,
        "output_tokens_per_s": written / seconds,
        "total_tokens_per_s": (read + written) / seconds,
    }


def goodput(records: Sequence[Record], targets: Mapping[str, float], seconds: float) -> float:
    """Requests per second that met every target (name -> milliseconds)."""

    def meets(record: Record) -> bool:
        found = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2e": record.e2e}
        return all(1e3 * found[name] <= limit for name, limit in targets.items())

    return sum(r.ok and meets(r) for r in records) / seconds
