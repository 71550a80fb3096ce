"""What is measured of one request, and how many of them become figures, in the names of three load generators.

quire's own names are vLLM's: TTFT = first chunk - send, TPOT = (E2E - TTFT) / (n - 1), ITL = pooled gaps between
chunks, E2E = last chunk - send. GuideLLM and AIPerf give two of these names to other quantities: `dialects`.
The same from the intended send time counts the wait that a slow server causes its own clients (coordinated omission).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

DEFINITIONS = {
    "dialect": "vLLM's names and formulas; GuideLLM's time_per_output_token includes TTFT, AIPerf's ITL is this TPOT",
    "ttft": "first chunk - send",
    "tpot": "(e2e - ttft) / (output tokens - 1), one value per request",
    "itl": "gaps between consecutive chunks, pooled over all requests",
    "e2e": "last chunk - send",
    "from_intended": "the same, counted from when the request was due",
    "client": "send - when the client was free to send: due, and within the bound of concurrency",
    "total throughput": "(input + output tokens) / duration",
    "prompt_tokens_per_s": "prompt tokens / (last first token of a batch - its start); llama-bench's pp",
    "generation_tokens_per_s": "tokens behind the first / (last token of a batch - its first); llama-bench's tg",
}
DIALECTS: dict[str, dict[str, str]] = {
    "vllm": {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e"},
    "guidellm": {
        "time_to_first_token": "ttft",
        "time_per_output_token": "tpot_guidellm",
        "inter_token_latency": "itl_guidellm",
        "request_latency": "e2e",
    },
    "aiperf": {
        "time_to_first_token": "ttft",
        "inter_token_latency": "tpot",
        "inter_chunk_latency": "itl",
        "request_latency": "e2e",
    },
}
"""Tool -> its name for a figure -> ours (`figures/metric_definitions.py`)."""
Spread = dict[str, float]


@dataclass(slots=True)
class Moments:
    """When each thing was by the server's clock, in its seconds; None: that never was, or was not told.

    `heard`: when the client read this, by its own.
    """

    heard: float
    received: float
    admitted: float | None
    first_token: float | None
    last_token: float | None
    told: float


@dataclass(slots=True)
class Record:
    """Times in seconds of one clock. `chunks`: when tokens arrived; `output_tokens` may be more than chunks.

    `ready`: when the client might have sent it, being due and within the bound of concurrency; None: when it was due.
    `cached_tokens`: of its prompt, as the server says. `turn`: of its conversation.
    """

    intended: float
    sent: float = 0.0
    chunks: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    ready: float | None = None
    cached_tokens: int = 0
    turn: int = 0
    moments: Moments | None = None

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

    @property
    def client(self) -> float:
        """How long after it might have been sent it was."""
        return self.sent - (self.intended if self.ready is None else self.ready)


def milliseconds(values: Iterable[float], weights: Sequence[int] | None = None) -> Spread | None:
    """Mean and percentiles (linear interpolation) of seconds, in milliseconds; None of nothing.

    `weights`: how often each value counts.
    """
    found = 1e3 * np.fromiter(values, float)
    if weights is not None:
        found = np.repeat(found, weights)
    if not len(found):
        return None
    p50, p90, p95, p99 = np.percentile(found, (50, 90, 95, 99)).tolist()
    ends = {"min": float(found.min()), "max": float(found.max())}
    return {"mean": float(found.mean()), "p50": p50, "p90": p90, "p95": p95, "p99": p99, **ends}


def latencies(records: Sequence[Record]) -> dict[str, Spread | None]:
    """The four latencies over all answered requests."""
    good = [r for r in records if r.ok]
    return {
        "ttft": milliseconds(r.ttft for r in good),
        "tpot": milliseconds(r.tpot for r in good if r.tpot is not None),
        "itl": milliseconds(gap for r in good for gap in r.gaps),
        "e2e": milliseconds(r.e2e for r in good),
    }


def others(records: Sequence[Record]) -> dict[str, Spread | None]:
    """What other tools call by names that mean something else here.

    GuideLLM's time per output token is E2E / n, counted n times, its inter-token latency TPOT, counted n - 1 times.
    """
    good = [r for r in records if r.ok and r.output_tokens]
    longer = [r for r in good if r.output_tokens > 1]
    return {
        "tpot_guidellm": milliseconds((r.e2e / r.output_tokens for r in good), [r.output_tokens for r in good]),
        "itl_guidellm": milliseconds(
            ((r.e2e - r.ttft) / (r.output_tokens - 1) for r in longer), [r.output_tokens - 1 for r in longer]
        ),
    }


def dialects(records: Sequence[Record]) -> dict[str, dict[str, Spread | None]]:
    """Tool -> its name -> the figure that it would have reported."""
    found = latencies(records) | others(records)
    return {tool: {name: found[ours] for name, ours in names.items()} for tool, names in DIALECTS.items()}


def from_intended(records: Sequence[Record]) -> dict[str, Spread | None]:
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


def phase_rates(records: Sequence[Record]) -> dict[str, float]:
    """Tokens per second of prompts and of generation (llama-bench's pp and tg), of batches one after the other.

    Prompts of a batch take from its start to the last first token, generation from the first to the last token; of each
    answer the first token belongs to the prompt. A phase that took no time is left out.
    """
    batches: dict[float, list[Record]] = {}
    for record in records:
        if record.ok:
            batches.setdefault(record.intended, []).append(record)
    reading = sum(max(r.chunks[0] for r in batch) - start for start, batch in batches.items())
    writing = sum(max(r.chunks[-1] for r in batch) - min(r.chunks[0] for r in batch) for batch in batches.values())
    good = [record for batch in batches.values() for record in batch]
    found = {}
    if reading > 0:
        found["prompt_tokens_per_s"] = sum(r.input_tokens for r in good) / reading
    if writing > 0:
        found["generation_tokens_per_s"] = sum(r.output_tokens - 1 for r in good) / writing
    return found


TARGETS: dict[str, Callable[[Record], float]] = {
    "ttft": lambda record: record.ttft,
    "tpot": lambda record: record.tpot or 0.0,
    "itl": lambda record: max(record.gaps, default=0.0),
    "e2e": lambda record: record.e2e,
}
"""What a target bounds, in seconds of one request; of `itl` its largest gap."""


def attainment(records: Sequence[Record], targets: Mapping[str, float]) -> int:
    """How many requests met every target (name -> milliseconds)."""
    return sum(r.ok and all(1e3 * TARGETS[name](r) <= limit for name, limit in targets.items()) for r in records)


def goodput(records: Sequence[Record], targets: Mapping[str, float], seconds: float) -> float:
    """Requests per second that met every target (name -> milliseconds)."""
    return attainment(records, targets) / seconds


def failures(records: Iterable[Record]) -> dict[str, int]:
    """Requests that failed, by kind: timeout, connection, the status of HTTP, or else error."""
    return dict(Counter(_kind(record.error) for record in records if record.error is not None))


def _kind(error: str) -> str:
    if "timeout: " in error:
        return "timeout"
    if status := re.search(r": HTTP (\d{3}): ", error):
        return f"HTTP {status[1]}"
    return "connection" if error.startswith("Unavailable: ") or "the connection broke" in error else "error"
