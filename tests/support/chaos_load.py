"""Streams under which engines are broken, and what each stream says when nothing is."""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from live_server import wait_until
from oracle import BACKENDS
from paths import SUPPORT
from quire.core.params import SamplingParams
from quire.core.request import Request
from serving_process import Serving
from shaped import PERSON, shaped


def sum_of_metric(client: Any, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}(_total)?\{{", line))


FULL = bool(os.environ.get("QUIRE_CHAOS_FULL"))
pytestmark = [
    pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built"),
    *([pytest.mark.timeout(4 * 3600)] if FULL else []),
]
KILLS, STREAMS = (50, 32) if FULL else (2, 8)


class Chaos(Serving):
    """`quire serve` with room for many deaths; `faults` are those of `chaos_worker`."""

    def __init__(self, *words: str, faults: str = "") -> None:
        super().__init__(
            *words, "--max-engine-deaths", "1000", program=[str(SUPPORT / "chaos_server.py")],
            environment={"QUIRE_CHAOS": faults, "PYTHONPATH": str(SUPPORT)}, module="chaos_worker",
        )  # fmt: skip


def bodies(count: int, adapters: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Requests of all kinds, each with a seed."""
    rng = random.Random(1)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.9, "logprobs": 2}, {"temperature": 1.0, "n": 2},
        {"temperature": 0.7, "presence_penalty": 1.0, "frequency_penalty": 0.4}, {"temperature": 0.8, "min_p": 0.05},
    ]  # fmt: skip
    found = []
    for i in range(count):
        prompt = [rng.randrange(8, 4900) for _ in range(rng.randrange(4, 120))]
        model = {"model": adapters[i % len(adapters)]} if adapters and i % 4 == 3 else {}
        found.append(
            kinds[i % len(kinds)] | model
            | {"prompt": prompt, "seed": i, "max_tokens": rng.randrange(40, 400), "stream": i % 3 > 0}
            | {"ignore_eos": i % 2 == 0}
        )  # fmt: skip
    return found


@dataclass
class Pauses:
    """Seconds from an engine's death to the next answer of `/health`."""

    seconds: list[float] = field(default_factory=list)

    def told(self, what: str) -> None:
        """A line for whoever measures."""
        ordered = sorted(self.seconds)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        print(f"\n{what}: {len(ordered)} deaths, pause median {statistics.median(ordered):.2f} s, p99 {p99:.2f} s")


@contextmanager
def served(server: Chaos, adapters: tuple[str, ...] = ()) -> Iterator[tuple[httpx.Client, list[dict[str, Any]], Any]]:
    """(client, bodies, what each gets alone) of a server that is up."""
    with server, server.up() as client:
        client.timeout = httpx.Timeout(600.0)
        asked = bodies(STREAMS, adapters)
        yield client, asked, [texts_of(client.post("/v1/completions", json=body)) for body in asked]
    assert "Traceback" not in "".join(server.log), "".join(server.log)[-3000:]


class Load:
    """Keeps all requests running in turns until it is told to stop, and keeps every answer."""

    def __init__(self, client: httpx.Client, asked: list[dict[str, Any]]) -> None:
        self._client, self._asked = client, asked
        self.answers: list[tuple[int, dict[int, str]]] = []
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(len(asked))
        self._threads: list[Future[None]] = [self._pool.submit(self._ask, i) for i in range(len(asked))]

    def _ask(self, i: int) -> None:
        while not self._stop.is_set():
            self.answers.append((i, texts_of(self._client.post("/v1/completions", json=self._asked[i]))))

    def finish(self, alone: list[dict[int, str]]) -> None:
        """Let the last ones end; every answer must be the one it has alone."""
        self._stop.set()
        for thread in self._threads:
            thread.result(timeout=300)
        self._pool.shutdown()
        assert {i for i, _ in self.answers} == set(range(len(self._asked)))
        for i, found in self.answers:
            assert found == alone[i], f"request {i}"


def restarts(client: httpx.Client) -> int:
    """Engines that came after another."""
    found = re.search(r"quire:engine_restarts_total\{[^}]*\} (\S+)", client.get("/metrics").text)
    assert found
    return int(float(found[1]))


def metric(client: httpx.Client, name: str) -> float:
    found = re.search(rf"{name}\{{[^}}]*\}} (\S+)", client.get("/metrics").text)
    assert found
    return float(found[1])


def wait_for_more(client: httpx.Client, tokens: int) -> None:
    """Until so many tokens more were made and many run at once: none is being tried alone, and all have gone on.

    A fault that comes from outside while one runs alone is that request's, as far as anybody can know.
    """
    first = metric(client, "vllm:generation_tokens_total")
    wait_until(lambda: metric(client, "vllm:generation_tokens_total") > first + tokens, seconds=120)
    wait_until(lambda: metric(client, "vllm:num_requests_running") > STREAMS // 2, seconds=120)


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
    "several": {"temperature": 1.0, "n": 3},
    "penalized": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 0},
    "scored": {"temperature": 0.0, "prompt_logprobs": 1},
    "shaped": {"temperature": 1.5, "structured_outputs": {"json": PERSON}, "n": 2, "logprobs": 0},
    "bounded": {"temperature": 0.7, "min_tokens": 10, "logit_bias": {9: 2.0}, "stop_token_ids": (70, 300)},
}


def requests() -> list[Request]:
    rng = random.Random(5)
    found = []
    for i, (name, params) in enumerate(PARAMS.items()):
        prompt = tuple(rng.randrange(8, 6000) for _ in range(20 + 9 * i))
        asked = SamplingParams(max_tokens=24, **params)
        made = Request(id=name, prompt=prompt, params=asked, seed=i, arrival=0.0, eos_token_ids=(4,))
        found.append(shaped(made))
    return found


def texts_of(reply: httpx.Response) -> dict[int, str]:
    """The text of each choice, streamed or not."""
    assert reply.status_code == 200, reply.text
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return {choice["index"]: choice["text"] for choice in reply.json()["choices"]}
    lines = [line[6:] for line in reply.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", reply.text[-500:]
    texts: dict[int, str] = {}
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts
