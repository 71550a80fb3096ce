"""Engines of tiny models, requests for them, and answers whose bits are compared."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.core.config import SchedulerConfig, flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request, TokenLogprob
from quire.engine.client import EngineInfo
from quire.engine.local import LocalEngine
from quire.engine.processes.supervisor import RestartPolicy, SupervisedEngine
from turns import turns


@dataclass
class Answer:
    """What one sequence gave."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    reason: str | None = None

    def bits(self) -> bytes:
        """Everything that must be equal, as bytes."""
        flat = [v for lp in self.logprobs for v in (lp.logprob, *(p for _, p in lp.top))]
        ids = [v for lp in self.logprobs for v in (lp.token, lp.rank, *(t for t, _ in lp.top))]
        return struct.pack(f"{len(flat)}d{len(ids)}q{len(self.tokens)}q", *flat, *ids, *self.tokens)


def make_requests(count: int, vocab: int, seed: int = 0) -> list[Request]:
    """Prompts of 1 to 120 tokens, a third of which share their beginning with another; half greedy, half sampled."""
    rng = random.Random(seed)
    stems = [[rng.randrange(vocab) for _ in range(60)] for _ in range(4)]
    requests = []
    for i in range(count):
        own = [rng.randrange(vocab) for _ in range(rng.choice((1, 2, 7, 16, 31, 60)))]
        prompt = (rng.choice(stems)[: rng.choice((16, 32, 60))] + own) if i % 3 == 0 else own
        params = SamplingParams(
            max_tokens=rng.randint(2, 12) if i % 5 else 60, temperature=0.0 if i % 2 else 1.0, top_p=0.9, logprobs=3
        )
        requests.append(Request(id=f"r{i}", prompt=tuple(prompt), params=params, seed=i, arrival=0.0))
    return requests


def run(engine: LocalEngine, requests: list[Request], rng: random.Random | None = None) -> dict[str, Answer]:
    """All requests at once, or trickling in at random steps when `rng` is given."""
    answers: dict[str, Answer] = {r.id: Answer([], []) for r in requests}
    waiting = list(requests)
    for _ in turns(lambda: waiting or engine.engine.has_work):
        batch = waiting[: len(waiting) if rng is None else rng.randint(0, 6)]
        for request in batch:
            engine.submit(request)
        del waiting[: len(batch)]
        report = engine.poll(0)
        for out in report.outputs if report else ():
            answer = answers[out.request_id]
            answer.tokens += out.tokens
            answer.logprobs += out.logprobs
            answer.reason = out.finish_reason
            assert out.error is None, out.error
    return answers


def engine_of(**options: object) -> LocalEngine:
    return LocalEngine(flat_config(**({"device": "cpu", "num_blocks": 512} | options)))


FORMATS = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4", "group_size": 64},
    "f32": {"dtype": "float32"},
    "kv_int8": {"kv_cache_dtype": "int8"},
    "kv_fp8": {"kv_cache_dtype": "fp8"},
}


def replace_id(request: Request, prefix: str) -> Request:
    return msgspec.structs.replace(request, id=f"{prefix}-{request.id}")


def killed(requests: list[Request], start: Callable[[], Any], chance: Callable[[Any], None]) -> dict[str, Answer]:
    """Serve `requests` by engines that end again and again; `chance` may end the one that it is given."""
    engines: list[Any] = []

    def started(before: EngineInfo | None, given_up: Callable[[], bool]) -> Any:
        engines.append(start())
        return engines[-1]

    client = SupervisedEngine(started, RestartPolicy(deaths=10_000, hang=0), SchedulerConfig())
    answers = {request.id: Answer([], []) for request in requests}
    for request in requests:
        client.submit(request)
    for _ in turns(lambda: any(answer.reason is None for answer in answers.values()), 200 * len(requests) + 2000):
        report = client.poll(0.05)
        for out in report.outputs if report else ():
            answer = answers[out.request_id]
            assert answer.reason is None and out.error is None, out
            answer.tokens += out.tokens
            answer.logprobs += out.logprobs
            answer.reason = out.finish_reason
        chance(engines[-1])
    client.close()
    assert len(engines) > 2, "engines were to end"
    return answers
