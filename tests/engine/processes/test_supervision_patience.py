"""A supervised engine's patience: how long a request is tried alone, and how long a step may take."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.core.errors import EngineFailure
from quire.core.machine import cpu_wait
from quire.engine.processes.supervisor import RestartPolicy
from quire.engine.processes.suspects import TRIED
from quire.engine.processes.watchdog import LARGE, SLOW, Watchdog
from quire.engine.stats import Stats
from stub_engine import WatchedEngine
from supervised_engines import Edge, request
from turns import turns


def test_who_is_tried_alone_stays_so_until_it_gave_two_tokens() -> None:
    """The step that gives the first may have been under way when the last engine died."""
    edge = Edge()
    edge.submit(request("a"), request("b"))
    edge.poll(2)
    edge.engine.dead = True
    edge.poll()
    tried: list[int] = []
    for _ in turns(lambda: edge.client._trial):
        tried.append(len(edge.client._trial))
        edge.poll()
    assert tried == [2] * TRIED + [1] * TRIED
    edge.finish()
    edge.check()


@pytest.mark.parametrize(
    ("steps", "most", "limit"),
    [
        ([(0.001, 1)], 1, 0.1),  # at least what was asked for
        ([(0.02, 1), (0.001, 1)], 1, SLOW * 0.02),
        ([(0.002, 1), (0.064, 64)], 256, SLOW * 0.064),
        ([(0.002, 1), (0.064, 64)], 4096, LARGE * 0.001 * 4096),  # a row of the largest step takes as long as the best
    ],
)
def test_a_hang_is_longer_than_any_step_may_be(
    steps: list[tuple[float, int]], most: int, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr("quire.engine.processes.watchdog.time", SimpleNamespace(monotonic=lambda: now))
    watchdog, engine = Watchdog(0.1, most), WatchedEngine()

    def check() -> None:
        watchdog.check(busy=True, changing=False, engine=engine)

    for seconds, rows in steps:
        watchdog.learn(Stats(step_seconds=seconds, step_tokens=rows))
    watchdog._heard = now - 0.9 * limit
    check()
    assert not engine.killed
    watchdog._heard = now - 1.1 * limit
    with pytest.raises(EngineFailure, match="hangs"):
        check()
    assert engine.killed


def test_an_engine_that_has_no_processor_does_not_hang() -> None:
    watchdog, engine = Watchdog(0.01, 1), WatchedEngine()
    watchdog.learn(Stats(step_seconds=0.0001, step_tokens=1))
    watchdog.check(True, False, engine)
    engine.waited += 3600.0
    time.sleep(0.05)
    watchdog.check(True, False, engine)
    assert not engine.killed
    watchdog.learn(Stats(step_seconds=0.0001, step_tokens=1))
    watchdog.check(True, False, engine)
    time.sleep(0.05)
    with pytest.raises(EngineFailure, match="hangs"):
        watchdog.check(True, False, engine)
    assert engine.killed, "what it waited for before it was last heard of does not count"


def test_the_wait_for_processors_is_told_by_the_kernel() -> None:
    before = cpu_wait(os.getpid())
    assert cpu_wait(os.getpid()) >= before >= 0.0
    assert cpu_wait(1 << 30) == 0.0, "there is no such process"


def test_the_wait_of_every_thread_counts() -> None:
    """Threads that share one processor wait for each other: together as long as all but one of them."""
    code = (
        "import os, sys, threading, zlib\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "def work():\n"
        "    while True:\n"
        "        zlib.compress(bytes(1 << 22))\n"
        "for _ in range(3):\n"
        "    threading.Thread(target=work, daemon=True).start()\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:

        def main_thread() -> float:
            return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1]) / 1e9

        assert process.stdout is not None and process.stdout.readline()
        time.sleep(0.5)
        main, all_threads = main_thread(), cpu_wait(process.pid)
        for _ in turns(lambda: cpu_wait(process.pid) < all_threads + 0.5):
            time.sleep(0.05)
        assert main_thread() < main + 0.1, "it reads, and waits for nobody"
        process.kill()


def test_what_is_paused_costs_no_step_and_is_not_to_blame() -> None:
    edge = Edge(patience=RestartPolicy(hang=0.2))
    edge.submit(request("a", 20), request("b", 20, n=2))
    edge.poll(3)
    assert edge.client.pause("a") and not edge.client.pause("nobody")
    edge.poll(3)
    assert edge.engine.running == 2 and len(edge.tokens["a", 0]) == 3
    edge.engine.dead = True
    edge.poll(3)
    assert not any("a" in each.id for each in edge.engine.submitted) and edge.client._kept["a"].deaths == 0
    for _ in turns(lambda: ("b", 1) not in edge.ends):
        edge.poll()
    time.sleep(0.3)
    edge.poll(2)
    assert len(edge.engines) == 2, "an engine that has only what is paused does not hang"
    edge.client.resume("a")
    edge.client.resume("a")
    edge.finish()
    edge.check()
