"""What breaks others, at a small scale; `make chaos-full` runs it at the scale that reliability is claimed for.

Every answer is compared with the one that the same request gets alone, so a token that is lost or comes twice is seen.
"""

from __future__ import annotations

from paths import SUPPORT
import os
import random
import re
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from live_server import wait_until
from oracle import BACKENDS
from test_lora_server import write_adapter
from test_replay import texts_of
from test_server_death import Serving

FULL = bool(os.environ.get("QUIRE_CHAOS_FULL"))
pytestmark = [
    pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built"),
    *([pytest.mark.timeout(4 * 3600)] if FULL else []),
]
KILLS, STREAMS = (50, 32) if FULL else (2, 8)
POISON = 5000


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


@pytest.mark.parametrize(
    ("end", "kills"),
    [
        pytest.param(signal.SIGKILL, 1, id="one kill"),
        pytest.param(signal.SIGKILL, KILLS, marks=pytest.mark.slow),
        pytest.param(signal.SIGSEGV, KILLS // 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, KILLS // 2, marks=pytest.mark.slow),
    ],
)
def test_engines_that_are_ended_lose_nothing(tmp_path: Path, end: signal.Signals, kills: int) -> None:
    """SIGSTOP is a hang, which the watchdog ends."""
    adapters = [f"--lora-modules=one={write_adapter(tmp_path / 'one', 1)}", "--enable-lora", "--max-loras", "2"]
    server = Chaos(*adapters, "--watchdog-timeout", "2", "--allow-runtime-lora-updating")
    with server, server.up() as client:
        client.timeout = httpx.Timeout(600.0)
        two = {"lora_name": "two", "lora_path": write_adapter(tmp_path / "two", 2)}
        assert client.post("/v1/load_lora_adapter", json=two).status_code == 200
        asked = bodies(STREAMS, ("one", "two"))
        alone = [texts_of(client.post("/v1/completions", json=body)) for body in asked]
        load, pauses = Load(client, asked), Pauses()
        for kill in range(kills):
            wait_for_more(client, 40 * STREAMS)
            began = time.monotonic()
            os.kill(server.engine, end)
            wait_until(lambda kill=kill: restarts(client) > kill, seconds=120)  # type: ignore[misc]
            pauses.seconds.append(time.monotonic() - began)
        load.finish(alone)
        assert restarts(client) == kills
    pauses.told(end.name)
    assert "Traceback" not in "".join(line for line in server.log if "quire" in line)


@pytest.mark.slow
def test_an_engine_that_exits_in_the_middle_of_a_report_loses_nothing(tmp_path: Path) -> None:
    for number in (3, 30) if FULL else (3,):
        mark = tmp_path / str(number)
        mark.touch()
        server = Chaos(faults=f"torn={number} mark={mark}")
        with served(server) as (client, asked, alone):
            mark.unlink()
            first = server.engine
            os.kill(first, signal.SIGKILL)  # the next engine counts its reports from the beginning
            wait_until(lambda: restarts(client) == 1, seconds=60)
            load = Load(client, asked)
            wait_until(lambda: restarts(client) == 2, seconds=60)
            load.finish(alone)


def test_a_request_that_kills_ends_alone() -> None:
    with served(Chaos(faults=f"poison={POISON}")) as (client, asked, alone), ThreadPoolExecutor(STREAMS) as pool:
        asked = [body | {"max_tokens": 40} for body in asked[: 15 if FULL else 7]]
        alone = [texts_of(client.post("/v1/completions", json=body)) for body in asked]
        sent = [pool.submit(client.post, "/v1/completions", json=body) for body in asked]
        poison = client.post("/v1/completions", json={"prompt": [9, POISON, 9], "max_tokens": 9})
        assert poison.status_code == 500 and poison.json()["error"]["type"] == "engine_error"
        assert [texts_of(future.result(timeout=60)) for future in sent] == alone
        assert restarts(client) <= 2


def test_an_engine_that_always_dies_ends_the_server_with_the_reason() -> None:
    server = Serving("--max-engine-deaths", "3")
    with server, server.up() as client:
        for death in range(3):
            wait_until(lambda: bool(server.engines()) and client.get("/readyz").status_code == 200, seconds=60)
            os.kill(server.engine, signal.SIGKILL)
            if death < 2:
                wait_until(lambda death=death: restarts(client) == death + 1, seconds=60)  # type: ignore[misc]
        assert server.process.wait(20) == 1
    assert "that was death 3 within 600 s" in "".join(server.log)
