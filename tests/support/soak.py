"""T26: a server under mixed traffic for QUIRE_SOAK_HOURS (1): does anything grow? `make soak`.

Requests that are read, left, stopped and broken, and engines that are killed now and then; every answer as alone. From
time to time the traffic pauses: then nothing may be in flight, no block used, and files and threads are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import grammar_abuse
from live_server import wait_until
from quire.cli.flags import to_arguments
from raw_client import RESET, ask, connect, request
from reliability_requests import malformed
from serving_process import Serving
from stub_server import rss_of
from tiny_model import OPTIONS, write_tiny

HOURS = float(os.environ.get("QUIRE_SOAK_HOURS", "1"))
CLIENTS = 8
ROUND = min(60.0, HOURS * 3600 / 12)
"""Seconds between two pauses."""
KILLS = max(2, int(2 * HOURS))
WORDS = 20_000
"""The tokenizer remembers the tokens of 10,000 words, 5.6 MiB: with broken bodies alone that grows for 24 minutes."""
WARM = 3
"""Rounds after which nothing more may be allocated for good; of an engine that came after a kill, one."""
MIB_PER_HOUR, NOISE = 1.0, 3.0
"""Growth of memory that is allowed, and what an allocator may keep in a run of any length, in MiB."""
DRIFT = 0.05
"""Growth of the time per token that is allowed, in a run of an hour or more: in minutes the machine changes by more."""
ALONE = 50
"""Requests whose median time per token is that of a pause."""
ABUSES = 10_000
"""Requests that mean harm after which neither server nor engine grows more: what failed is kept, and allocators keep
what such requests needed most. Measured: the server has 89 MiB after 500, 103 after 5,000; the engine 94 after 5,000,
and 107 from 8,000 on where it had no more before it was counted."""
GRAMMARS = 40
"""Small ones that take the place of those that an engine keeps, 32 of up to 6 MiB, before its memory is counted."""
QUIET = 3.0
"""Seconds without requests in which freed memory goes back to the system, before it is counted."""


@dataclass
class Sample:
    """What was counted in a pause. `engine`: its process; memory in MiB, `seconds` since the start.

    `tpot`: milliseconds per token of a request that runs alone, the median of several.
    """

    seconds: float
    engine: int
    rss: dict[str, float]
    files: dict[str, int]
    threads: dict[str, int]
    blocks: float
    tpot: float


@dataclass
class Traffic:
    """Clients that ask without end. `alone`: what each of `bodies` gets alone."""

    port: int
    bodies: list[dict[str, Any]]
    alone: list[str]
    rng: random.Random = field(default_factory=lambda: random.Random(26))
    counts: dict[str, int] = field(default_factory=dict)

    async def run(self, seconds: float) -> None:
        """Ask for so long; what was begun is finished."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(end) for _ in range(CLIENTS)))

    async def _client(self, end: float) -> None:
        kinds: list[tuple[Callable[[], Any], int]] = [
            (self._whole, 12), (self._leave, 6), (self._broken, 4), (self._half_a_head, 2), (self._metrics, 2),
            (self._abuse, 1),
        ]  # fmt: skip
        while time.monotonic() < end:
            kind = self.rng.choices([k for k, _ in kinds], [w for _, w in kinds])[0]
            self.counts[kind.__name__[1:]] = self.counts.get(kind.__name__[1:], 0) + 1
            await kind()

    async def _whole(self) -> None:
        number = self.rng.randrange(len(self.bodies))
        answer = await ask(self.port, request(self.bodies[number]))
        assert answer.status == 200, answer.body
        assert answer.text == self.alone[number], f"{self.bodies[number]}: {answer.text!r}"

    async def _leave(self) -> None:
        data = request(self.rng.choice(self.bodies) | {"n": 2})
        sock = await connect(self.port)
        with contextlib.closing(sock):
            await asyncio.get_running_loop().sock_sendall(sock, data[: self.rng.choice((50, len(data), len(data)))])
            await asyncio.sleep(self.rng.random() * 0.1)
            if self.rng.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    async def _broken(self) -> None:
        path, body = malformed(self.rng)
        assert (await ask(self.port, request(body, path))).status in (200, 400, 404), body

    async def _abuse(self) -> None:
        """What means harm gets an answer or is refused; an engine that dies of it is counted at the end."""
        path, body = abuse(self.rng)
        answer = await ask(self.port, request(body, path))
        assert answer.status in (200, 400, 413, 429), f"{answer.status} {answer.body!r:.300} to {path} {body!r:.300}"
        assert b'"finish_reason":"error"' not in answer.body, f"{answer.body!r:.300} to {path} {body!r:.300}"

    async def _half_a_head(self) -> None:
        sock = await connect(self.port)
        with contextlib.closing(sock):
            await asyncio.get_running_loop().sock_sendall(sock, b"POST /v1/completions HTTP/1.1\r\nHost: loc")
            await asyncio.sleep(0.05)

    async def _metrics(self) -> None:
        assert (
            await ask(self.port, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        ).status == 200


def abuse(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A grammar or schema that means harm, numbers at the ends of their ranges, or a text of half a megabyte."""
    kind = rng.randrange(4)
    if kind == 0:
        return next(grammar_abuse.cases(1, rng.randrange(1 << 30)))
    if kind == 1:
        schema = grammar_abuse.shaped(rng)
        return "/v1/completions", {"prompt": "x", "max_tokens": 9, "user": "abuser", "guided_json": schema}
    if kind == 2:
        extreme: dict[str, list[float]] = {
            "repetition_penalty": [1e-300, 1e-30, 1e30, 1e300], "presence_penalty": [-2, 2], "temperature": [1e-300, 2],
            "top_p": [1e-300, 1], "min_p": [0, 1], "frequency_penalty": [-2, 2],
        }  # fmt: skip
        fields = {name: rng.choice(values) for name, values in extreme.items() if rng.random() < 0.5}
        return "/v1/completions", {
            "prompt": "x",
            "max_tokens": 9,
            "logit_bias": {"5": rng.choice((-100, 100))},
        } | fields
    text = rng.choice(("a", "a ", "\u4e2d", "<|end|>", " ", "\u0301")) * rng.choice((100, 10_000, 250_000))
    return rng.choice(("/tokenize", "/v1/completions")), {"prompt": text, "max_tokens": 1}


def bodies() -> list[dict[str, Any]]:
    """Requests of many kinds, each with a seed."""
    rng = random.Random(1)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.9}, {"stop": ["a", "e"]}, {"presence_penalty": 1.0}, {"min_p": 0.05}
    ]  # fmt: skip
    return [
        kinds[i % len(kinds)] | {"prompt": [rng.randrange(4, 250) for _ in range(rng.randrange(2, 60))], "seed": i}
        | {"max_tokens": rng.randrange(4, 60), "stream": i % 3 > 0, "ignore_eos": True}
        for i in range(40)
    ]  # fmt: skip


def metric(client: httpx.Client, name: str) -> float:
    """The value of a metric."""
    found = re.search(rf"^{name}\{{.*\}} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


def per_token(client: httpx.Client) -> float:
    """Milliseconds per token of a request, all of it."""
    body = {"prompt": [9] * 20, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    began = time.monotonic()
    assert client.post("/v1/completions", json=body).status_code == 200
    return 1e3 * (time.monotonic() - began) / 100


@contextlib.contextmanager
def each_on_its_core(pids: Iterable[int]) -> Iterator[None]:
    """Meanwhile each process keeps to one core: wherever they happened to be, the time differed by a factor of two."""
    cores = sorted(os.sched_getaffinity(0))
    tasks = {int(each.name): i for i, pid in enumerate(pids) for each in Path(f"/proc/{pid}/task").iterdir()}
    for task, i in tasks.items():
        os.sched_setaffinity(task, {cores[i % len(cores)]})
    try:
        yield
    finally:
        for task in tasks:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(task, cores)


async def fill_refused(port: int) -> None:
    """Have the server see so many requests that mean harm that what it keeps of them grows no more."""
    traffic = Traffic(port, [], [], rng=random.Random(27))

    async def some() -> None:
        for _ in range(ABUSES // CLIENTS):
            await traffic._abuse()

    await asyncio.gather(*(some() for _ in range(CLIENTS)))


def small_grammars(client: httpx.Client) -> None:
    """Have the engine forget larger ones: it keeps what came twice."""
    for i in range(GRAMMARS):
        for _ in range(2):
            body = {"prompt": "x", "max_tokens": GRAMMARS + 2, "guided_regex": f"a{{{i + 1}}}"}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text


def count(server: Serving, client: httpx.Client, began: float) -> Sample:
    """Wait until nothing is in flight, and count."""
    wait_until(lambda: metric(client, "quire:requests_in_flight") == 0, seconds=120)
    small_grammars(client)
    wait_until(lambda: metric(client, "vllm:kv_cache_usage_perc") == 0, seconds=20)
    pids = {"server": server.process.pid, "engine": server.engine}
    with each_on_its_core(pids.values()):
        tpot = statistics.median(per_token(client) for _ in range(ALONE))
    time.sleep(QUIET)
    at = {name: Path(f"/proc/{pid}") for name, pid in pids.items()}
    return Sample(
        seconds=time.monotonic() - began,
        engine=pids["engine"],
        rss={name: rss_of(pid) / 2**20 for name, pid in pids.items()},
        files={name: len(list((path / "fd").iterdir())) for name, path in at.items()},
        threads={name: len(list((path / "task").iterdir())) for name, path in at.items()},
        blocks=metric(client, "vllm:kv_cache_usage_perc"),
        tpot=tpot,
    )


def slope(points: list[tuple[int, float, float]]) -> float:
    """Least squares of (process, seconds, value): growth per hour within processes; 0 where that is not known."""
    above = below = 0.0
    for process in {p for p, _, _ in points}:
        own = [(t, v) for p, t, v in points if p == process]
        middle, mean = statistics.fmean(t for t, _ in own), statistics.fmean(v for _, v in own)
        above += sum((t - middle) * (v - mean) for t, v in own)
        below += sum((t - middle) ** 2 for t, _ in own)
    return 3600 * above / below if below else 0.0


def verdict(samples: list[Sample]) -> list[str]:
    """Print what grew; what grew too much."""
    wrong = []
    fresh = {s.engine: [x for x in samples if x.engine == s.engine][:1] for s in samples}
    warm = samples[WARM:]
    hours = (warm[-1].seconds - warm[0].seconds) / 3600
    allowed = MIB_PER_HOUR * hours + NOISE
    for name in ("server", "engine"):
        used = [s for s in warm if name == "server" or s not in fresh[s.engine]]
        grown = slope([(s.engine if name == "engine" else 0, s.seconds, s.rss[name]) for s in used])
        print(f"{name}: RSS {grown:+.2f} MiB/h, {grown * hours:+.2f} MiB in {hours * 60:.1f} min")
        if grown * hours > allowed:
            wrong.append(f"the {name}'s memory grew by {grown * hours:.1f} MiB, more than {allowed:.1f}")
        for what in ("files", "threads"):
            values = [getattr(s, what)[name] for s in used]
            half = len(values) // 2
            before = values[:half] + [getattr(s, what)[name] for s in samples[:WARM] if name == "server"]
            print(f"{name}: {what} {min(values)} to {max(values)}")
            if max(values[half:], default=0) > max(before, default=0):
                wrong.append(f"the {name}'s {what} grew: {values}")
    if any(s.blocks for s in samples):
        wrong.append("blocks were used though nothing ran")
    times = [s.tpot for s in warm]
    third = max(1, len(times) // 3)
    before, after = statistics.median(times[:third]), statistics.median(times[-third:])
    noise = doubt(times[:third], times[-third:])
    print(
        f"time per token: {before:.3f} ms, at the end {after:.3f} ms ({after / before - 1:+.1%}; means +- {noise:.1%})"
    )
    if HOURS >= 1 and after / before - 1 > DRIFT:
        wrong.append("tokens take longer than at the beginning")
    return wrong


def doubt(before: list[float], after: list[float]) -> float:
    """Two standard errors of the growth of the mean, as a share of it."""
    if len(before) < 2:
        return 0.0
    error = sum(statistics.variance(each) / len(each) for each in (before, after)) ** 0.5
    return float(2 * error / statistics.fmean(before))


def fill_tokenizer(client: httpx.Client) -> None:
    """Have it see so many words that what it remembers grows no more."""
    rng = random.Random(2)
    for _ in range(WORDS // 1000):
        words = ("".join(rng.choices("abcdefghijklmnop", k=rng.randrange(3, 20))) for _ in range(1000))
        assert client.post("/tokenize", json={"prompt": " ".join(words)}).status_code == 200


async def fill_pools(port: int) -> None:
    """Have as many threads and processes begin as ever do: those of templates, metrics, grammars and checks of schemas
    begin when others are busy.

    A third one for templates, and its socket, came after 41 minutes of an hour; a second one for schemas in the last
    minute of a quarter.
    """
    chat = request({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}, "/v1/chat/completions")
    metrics = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    for _ in range(3):
        answers = await asyncio.gather(*(ask(port, each) for each in [chat, metrics] * 20))
        assert all(answer.status == 200 for answer in answers)
    slow = [{"prompt": "x", "max_tokens": 1, "guided_regex": f"(.{{0,300}}x){{{300 + i}}}"} for i in range(12)]
    await asyncio.gather(*(ask(port, request(each)) for each in slow))
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2, "uniqueItems": True}
    checked = request({"prompt": "x", "max_tokens": 100, "guided_json": schema})
    answers = await asyncio.gather(*(ask(port, checked) for _ in range(20)))
    assert all(answer.status == 200 for answer in answers)


def soak(server: Serving, client: httpx.Client) -> list[str]:
    """Rounds of traffic, some of them with a kill; what is wrong at the end."""
    fill_tokenizer(client)
    asked = bodies()
    alone = [client.post("/v1/completions", json=body | {"stream": False}).json() for body in asked]
    port = client.base_url.port
    assert port is not None
    asyncio.run(fill_pools(port))
    asyncio.run(fill_refused(port))
    traffic = Traffic(port, asked, [reply["choices"][0]["text"] for reply in alone])
    began, samples, killed = time.monotonic(), list[Sample](), 0
    rounds = max(WARM + 6, int(HOURS * 3600 / ROUND))
    if HOURS < 1:  # at its end: an engine that is new allocates for longer than its part of such a run
        when = set(range(rounds - KILLS, rounds))
    else:
        when = {WARM + 1 + (rounds - WARM) * (2 * k + 1) // (2 * KILLS) for k in range(KILLS)}

    async def one(number: int) -> None:
        nonlocal killed
        running = asyncio.create_task(traffic.run(ROUND))
        if number in when:
            await asyncio.sleep(ROUND / 3)
            os.kill(server.engine, signal.SIGKILL)
            killed += 1
        await running

    for number in range(rounds):
        asyncio.run(one(number))
        sample = count(server, client, began)
        samples.append(sample)
        print(json.dumps({k: v for k, v in vars(sample).items() if k != "blocks"}), flush=True)
    print(f"{sum(traffic.counts.values())} requests: {traffic.counts}; {killed} engines killed")
    wrong = verdict(samples)
    if metric(client, "quire:engine_restarts_total") != killed:
        wrong.append("engines died that nobody killed")
    return wrong


def main() -> int:
    """0 if nothing grew."""
    with tempfile.TemporaryDirectory() as folder:
        options = to_arguments(OPTIONS | {"threads": 1, "max_engine_deaths": 1_000_000})
        with Serving(str(write_tiny(Path(folder) / "tiny")), *options) as server, server.up() as client:
            client.timeout = httpx.Timeout(120.0)
            try:
                wrong = soak(server, client)
            except BaseException:
                print("".join(server.log[-60:]), file=sys.stderr)  # what it said before the answer that was wrong
                raise
    wrong += ["the server's log has a traceback"] if "Traceback" in "".join(server.log) else []
    for line in wrong:
        print(f"FAILED: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
