"""Many clients at once, and clients that leave, stall or are too many.

`make reliability` runs all of it at a small scale, `make reliability-full` at the scale that is claimed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import subprocess
import sys
import time

import pytest

from live_server import LiveServer, live, wait_until
from paths import SUPPORT
from raw_client import RESET, Answer, ask, connect, percentile, request
from reliability_requests import FULL, MIB, ROOMY, alone, asked
from stub_engine import StubEngine, stub_info
from stub_server import StubServer

PROBE = SUPPORT / "probe.py"
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


class Probe:
    """Asks all the time, in a process of its own: that of the clients is busy. `what`: as probe.py has it."""

    def __init__(self, port: int, what: str = "livez") -> None:
        self._process = subprocess.Popen([sys.executable, "-S", str(PROBE), str(port), what], **PIPES)  # type: ignore[call-overload]

    def end(self) -> list[float]:
        """Seconds that each answer took."""
        out, _ = self._process.communicate(b"\n", timeout=120)
        assert self._process.returncode == 0
        return [float(line) for line in out.split()]


@pytest.mark.slow
def test_thousands_of_streams_are_whole() -> None:
    """T1. The small scale of every run: test_fifty_concurrent_streams_complete_with_their_own_tokens."""
    count, length = (5000 if FULL else 1000), 64

    async def run(port: int) -> tuple[list[Answer], int]:
        sources = [f"127.0.0.{2 + i % 3}" for i in range(count)]
        streams = [
            asyncio.create_task(ask(port, request(asked(i, length)), source)) for i, source in enumerate(sources)
        ]
        most = server.rss
        while not all(stream.done() for stream in streams):
            await asyncio.sleep(0.2)
            most = max(most, server.rss)
        return await asyncio.gather(*streams), most

    with StubServer(0.02, ROOMY) as server:
        files, rss = server.files, server.rss
        probe = Probe(server.port)
        answers, most = asyncio.run(run(server.port))
        took = probe.end()
        for i, answer in enumerate(answers):
            assert answer.status == 200 and answer.done and answer.text == alone([8 + i % 200, 9], i, length), i
        wait_until(lambda: server.files <= files and server.in_flight == 0)
    each = (most - rss) / count / 1024
    print(f"\nT1: {count} streams, {each:.0f} KiB each, /livez median {1e3 * percentile(took, 0.5):.0f} ms, "
          f"p99 {1e3 * percentile(took, 0.99):.0f} ms")  # fmt: skip
    assert each <= 150


class Noting(StubEngine):
    """Remembers when requests were aborted, by their seeds."""

    def __init__(self) -> None:
        super().__init__(stub_info(**ROOMY), step_seconds=0.005)
        self.left: dict[int, float] = {}

    def abort(self, request_id: str, index: int | None = None) -> None:
        """As the stub does."""
        with contextlib.suppress(StopIteration):
            self.left[next(r.seed for r in reversed(self.submitted) if r.id == request_id)] = time.monotonic()
        super().abort(request_id, index)


async def leave(port: int, seed: int, rng: random.Random) -> float:
    """Leave at some moment, by FIN or RST; when that was."""
    loop, stream = asyncio.get_running_loop(), rng.random() < 0.5
    data = request(asked(seed, 250) | {"stream": stream, "n": rng.choice((1, 1, 3))})
    sock = await connect(port)
    with contextlib.closing(sock):
        phase = rng.random()
        await loop.sock_sendall(sock, data if phase > 0.3 else data[: rng.randrange(len(data))])
        if phase > 0.5:
            await asyncio.sleep(rng.random() * 0.2)
        if phase > 0.7 and stream:
            await loop.sock_recv(sock, rng.randrange(1, 2000))
        if rng.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    return time.monotonic()


def test_clients_that_leave_leave_nothing() -> None:
    """T2."""
    count = 10_000 if FULL else 120
    rng, stub = random.Random(2), Noting()

    async def one(server: LiveServer, seed: int, places: asyncio.Semaphore) -> tuple[int, float]:
        async with places:
            if seed % 2:
                return seed, await leave(server.port, seed, rng)
            answer = await ask(server.port, request(asked(seed, 24)))
            assert answer.done and answer.text == alone([8 + seed % 200, 9], seed, 24), seed
            return seed, 0.0

    async def run(server: LiveServer) -> dict[int, float]:
        places = asyncio.Semaphore(40)
        return dict(await asyncio.gather(*(one(server, seed, places) for seed in range(count))))

    with live(stub) as server:
        left = asyncio.run(run(server))
        wait_until(lambda: server.engine.in_flight == 0 and server.state.active == 0 and stub.running == 0)
        assert not server.server.server_state.connections and not server.engine._streams
        assert server.complete("again", max_tokens=2)["choices"][0]["finish_reason"] == "length"
    late = [stub.left[seed] - at for seed, at in left.items() if at and seed in stub.left]
    assert len(late) > count // 8
    print(f"\nT2: {len(late)} of {count} aborted, after a median of {1e3 * percentile(late, 0.5):.0f} ms, "
          f"p99 {1e3 * percentile(late, 0.99):.0f} ms")  # fmt: skip
    assert percentile(late, 0.99) < 1.0


@pytest.mark.slow
def test_readers_that_stall_cost_little_and_slow_nobody_down() -> None:
    """T3. Its small scale: test_a_reader_that_stops_reading_is_cut_off_and_aborted."""
    stalled, timeout = (500, 30.0) if FULL else (100, 6.0)
    info = ROOMY | {"max_model_len": 1 << 20}

    async def fast(port: int) -> float:
        began = time.monotonic()
        answers = await asyncio.gather(*(ask(port, request(asked(i, 200))) for i in range(50)))
        assert all(answer.done for answer in answers)
        return time.monotonic() - began

    async def start(port: int, seed: int, window: int) -> socket.socket:
        sock = await connect(port, window)
        body = asked(seed, 900_000, logprobs=20)
        await asyncio.get_running_loop().sock_sendall(sock, request(body))
        return sock

    async def read(sock: socket.socket) -> None:
        while await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
            pass

    async def run(server: StubServer) -> tuple[float, float, int, float]:
        """Seconds of 50 readers beside others that read and that stall, bytes that those cost, when they were cut."""
        readers = [await start(server.port, i, 0) for i in range(stalled)]
        reading = [asyncio.create_task(read(sock)) for sock in readers]
        before = min([await fast(server.port) for _ in range(2)])
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for sock in readers:
            sock.close()
        wait_until(lambda: server.in_flight == 0)
        rss, began = server.rss, time.monotonic()
        stalling = [await start(server.port, i, 4096) for i in range(stalled)]
        beside = min([await fast(server.port) for _ in range(2)])
        grown = server.rss - rss
        while server.in_flight:
            grown = max(grown, server.rss - rss)
            assert time.monotonic() - began < 2 * timeout + 60
            await asyncio.sleep(0.2)
        for sock in stalling:
            sock.close()
        return before, beside, grown, time.monotonic() - began

    with StubServer(0.02, info, write_timeout=timeout) as server:
        before, beside, grown, seconds = asyncio.run(run(server))
    print(f"\nT3: {stalled} stalled readers, {grown / stalled / 1024:.0f} KiB each, cut off within {seconds:.0f} s; "
          f"50 others at {before / beside:.0%} of their speed beside readers that read")  # fmt: skip
    assert before / beside > 0.8
    assert grown / stalled <= (64 + 150) << 10


@pytest.mark.slow
def test_four_times_too_much_is_refused_quickly_and_costs_little() -> None:
    """T17. Its small scale: test_a_full_queue_is_a_429_with_retry_after."""
    seconds, room, length = (600.0 if FULL else 8.0), 32, 40
    rng = random.Random(17)

    async def client(port: int, number: int, end: float, took: list[float]) -> int:
        done = 0
        while time.monotonic() < end:
            began = time.monotonic()
            answer = await ask(port, request(asked(number, length)))
            if answer.status == 429:
                took.append(time.monotonic() - began)
                assert int(answer.headers["retry-after"]) >= 1
                await asyncio.sleep(rng.uniform(0, 0.5))  # all at the same pace, they would come in one burst
            else:
                assert answer.status == 200 and answer.done
                done += 1
        return done

    async def run(port: int, clients: int, seconds: float) -> tuple[float, list[float]]:
        took: list[float] = []
        began = time.monotonic()
        done = await asyncio.gather(*(client(port, i, began + seconds, took) for i in range(clients)))
        return sum(done) / (time.monotonic() - began), took

    with StubServer(0.02, {"max_num_queued_reqs": room}) as server:
        peak, _ = asyncio.run(run(server.port, room, min(seconds, 20.0)))
        asyncio.run(run(server.port, 4 * room, 2.0))
        rss = server.rss
        probe = Probe(server.port, "refusal")
        good, took = asyncio.run(run(server.port, 4 * room, seconds))
        alone = probe.end()
        grown = server.rss - rss
    times = ", ".join(
        f"{who} median {1e3 * percentile(each, 0.5):.1f} ms, p99 {1e3 * percentile(each, 0.99):.1f} ms"
        for who, each in (("another process:", alone), ("the clients, whose loop is busy:", took))
    )
    print(
        f"\nT17: {good / peak:.0%} of {peak:.1f} requests/s, {len(took)} refused; {times}; {grown / MIB:.1f} MiB more"
    )
    assert took and good >= 0.8 * peak and grown < 8 * MIB
