"""Run a recorded run again on an engine in this process, and compare every token with those that were recorded.

A token depends on the request, its seed and the tokens before it alone, so that the same model gives the same bits
whatever else is different: when requests arrive, how they are scheduled, what the prefix cache holds. Where prompts
were not recorded the replay is synthetic: random tokens, as many as there were, and as many answers' tokens. Then
lengths, arrivals and parameters are those of the recording, but no prefix is shared, and nothing can be compared.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec.structs import replace

import quire
from quire.bench.records import Record, from_intended, latencies, rates
from quire.bench.workload import FIRST_TOKEN
from quire.core.config import SECTIONS
from quire.core.request import FinishReason, Output, Request
from quire.engine.client import EngineInfo
from quire.engine.local import LocalEngine
from quire.engine.record.recording import AdapterLine, EndLine, RecordedRun, RequestLine

FACTS = ("model", "backend", "isa", "dtype", "quantization", "kv_cache_dtype", "vocab_size")
"""Of an engine, on which its bits depend."""
MOST = 100
"""Differences that are told one by one."""
Key = tuple[str, int]


@dataclass(frozen=True)
class Difference:
    """Where a sequence first gave another token than was recorded (None: it had ended), or another reason to end."""

    request_id: str
    index: int
    position: int
    recorded: int | str | None
    replayed: int | str | None


@dataclass
class ReplayResult:
    """What came of a replay. `unfinished`: requests whose end was not recorded; `skipped`: those that left at once;
    `with_images`: those with images, whose pixels are not recorded, so that they cannot run."""

    records: list[Record] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    compared: int = 0
    tokens: int = 0
    unfinished: int = 0
    skipped: int = 0
    with_images: int = 0
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def results(self) -> dict[str, Any]:
        """Results for `bench.report`: rates and latencies, then what was compared."""
        return {
            "rates": rates(self.records, self.seconds),
            "latency_ms": latencies(self.records),
            "from_intended_ms": from_intended(self.records),
            "errors": self.errors[:8],
            "replay": {
                "sequences_compared": self.compared,
                "tokens_compared": self.tokens,
                "different": len(self.differences),
                "differences": [asdict(each) for each in self.differences[:MOST]],
                "unfinished_in_the_recording": self.unfinished,
                "skipped": self.skipped,
                "with_pictures": self.with_images,
            },
        }


def options_of(run: RecordedRun) -> dict[str, Any]:
    """What the recorded engine was told, by flat names, and the limits that it had found for itself."""
    flat: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        given = getattr(run.began.config, name)
        fields = (field for field in msgspec.structs.fields(section) if getattr(given, field.name) != field.default)
        flat |= {field.name: getattr(given, field.name) for field in fields}
    info = run.began.info
    return flat | {"max_model_len": info.max_model_len, "num_blocks": info.num_blocks}


def doubts(run: RecordedRun, info: EngineInfo) -> list[str]:
    """What differs between the recorded engine and this one, and may change bits."""
    found = [
        f"{name} was {getattr(run.began.info, name)}, here it is {getattr(info, name)}"
        for name in FACTS
        if getattr(run.began.info, name) != getattr(info, name)
    ]
    if run.began.version != quire.__version__:
        found.append(f"quire was {run.began.version}, here it is {quire.__version__}")
    return found


class Replay:
    """`run` on `engine`; `speed`: times as fast as requests arrived, inf = all at once."""

    def __init__(self, run: RecordedRun, engine: LocalEngine, speed: float) -> None:
        self._run, self._engine, self._speed = run, engine, speed
        events: list[RequestLine | AdapterLine] = [*run.asked, *run.changes]
        self._events = deque(sorted(events, key=lambda each: (each.at, isinstance(each, RequestLine))))
        self._live: dict[Key, list[int]] = {}
        self._requests: dict[str, Request] = {}
        self._records: dict[str, Record] = {}
        self._limits: dict[Key, int] = {}
        self._start = 0.0
        self.outcome = ReplayResult()

    def go(self) -> ReplayResult:
        """Submit what is due, step, until all has ended."""
        for name, folder in self._run.began.adapters.items():
            self._engine.change_adapter(name, folder)
        self._start = time.perf_counter()
        while self._events or self._live:
            wait = self._submit_due()
            report = self._engine.poll(0.0)
            if report is None:
                time.sleep(min(wait, 0.01))
                continue
            self.outcome.errors += [change.error for change in report.changes if change.error]
            for output in report.outputs:
                self._take(output)
        self.outcome.seconds = time.perf_counter() - self._start
        self.outcome.records = list(self._records.values())
        return self.outcome

    def _submit_due(self) -> float:
        """Hand over what is due, in order; seconds until the next is. An adapter changes when nobody uses it."""
        while self._events:
            event = self._events[0]
            due = self._start + event.at / self._speed
            now = time.perf_counter()
            if due > now:
                return due - now
            if isinstance(event, RequestLine):
                self._submit(event, due)
            elif any(self._requests[key[0]].adapter == event.name for key in self._live):
                return 0.0
            else:
                self._engine.change_adapter(event.name, event.folder)
            self._events.popleft()
        return 0.0

    def _submit(self, asked: RequestLine, due: float) -> None:
        ends = [self._run.ends.get((asked.request.id, i)) for i in range(asked.request.params.n)]
        if all(end is not None and end.reason == "abort" and not end.count for end in ends):
            self.outcome.skipped += 1
            return
        if any(not image.pixels for image in asked.request.images):
            self.outcome.with_images += 1
            return
        self.outcome.unfinished += None in ends
        request = asked.request if self._run.began.prompts else self._made_up(asked, ends)
        request = replace(request, arrival=time.monotonic())
        for index, end in enumerate(ends):
            self._live[request.id, index] = []
            if end is not None and (end.reason == "abort" or not self._run.began.prompts):
                self._limits[request.id, index] = end.count
        self._requests[request.id] = request
        self._records[request.id] = Record(due, time.perf_counter(), input_tokens=len(request.prompt))
        self._engine.submit(request)

    def _made_up(self, asked: RequestLine, ends: list[EndLine | None]) -> Request:
        """A request of the same lengths, whose tokens its seed makes up."""
        rng, vocab = random.Random(asked.request.seed), self._engine.info.vocab_size
        first = min(FIRST_TOKEN, vocab - 1)
        prompt = tuple(rng.randrange(first, vocab) for _ in range(asked.prompt_tokens))
        most = max((max(1, end.count) for end in ends if end is not None), default=asked.request.params.max_tokens)
        params = replace(asked.request.params, ignore_eos=True, stop_token_ids=(), min_tokens=0, max_tokens=most)
        return replace(asked.request, prompt=prompt, params=params)

    def _take(self, output: Output) -> None:
        key = output.request_id, output.index
        made = self._live.get(key)
        if made is None:
            return
        record = self._records[output.request_id]
        if output.tokens:
            record.chunks.append(time.perf_counter())
            record.output_tokens += len(output.tokens)
            made += output.tokens
        reason = output.finish_reason
        if output.error:
            record.error = output.error
            self.outcome.errors.append(f"{output.request_id}: {output.error}")
        if reason is None and len(made) >= self._limits.get(key, len(made) + 1):
            self._engine.abort(*key)
            reason = "abort"
        if reason is not None:
            del self._live[key]
            self._compare(key, made, reason)

    def _compare(self, key: Key, made: list[int], reason: FinishReason) -> None:
        """A sequence that was cut off has the tokens of before at least; what else came is of no account."""
        end = self._run.ends.get(key)
        if end is None or end.tokens is None:
            return
        cut = end.reason in ("abort", "error")
        wanted, found = list(end.tokens), made[: len(end.tokens)] if cut else made
        self.outcome.compared += 1
        self.outcome.tokens += len(wanted)
        if wanted != found:
            pairs = zip_longest(wanted, found)
            place, (want, got) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
            self.outcome.differences.append(Difference(*key, place, want, got))
        elif reason != end.reason and not cut:
            self.outcome.differences.append(Difference(*key, len(wanted), end.reason, reason))
