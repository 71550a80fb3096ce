"""What breaks others, at a small scale; `make chaos-full` runs it at the scale that reliability is claimed for.

Every answer is compared with the one that the same request gets alone, so a token that is lost or comes twice is seen.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from chaos_load import (
    FULL,
    KILLS,
    STREAMS,
    Chaos,
    Load,
    Pauses,
    bodies,
    restarts,
    served,
    texts_of,
    wait_for_more,
)
from chaos_load import pytestmark as pytestmark
from live_server import wait_until
from lora_adapters import write_server_adapter as write_adapter
from serving_process import Serving

POISON = 5000


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
