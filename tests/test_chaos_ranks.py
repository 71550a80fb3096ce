"""Ranks and replicas that are killed or stopped under load, in each layout; every answer as alone."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import httpx
import pytest

from live_server import wait_until
from oracle import write
from quire.model.disk.checkpoint import EMBEDDED
from test_chaos import FULL, STREAMS, Chaos, Load, Pauses, metric, pytestmark, restarts, served, wait_for_more
from test_server_death import children

__all__ = ["pytestmark"]
KILLS = 50 if FULL else 1
LAYOUTS = {
    "tensor 2": ["--tensor-parallel-size", "2"],
    "stages 2": ["--pipeline-parallel-size", "2"],
    "stages 2 of tensor 2": ["--pipeline-parallel-size", "2", "--tensor-parallel-size", "2"],
    "context 2": ["--context-parallel-size", "2"],
    "experts 2": ["--tensor-parallel-size", "2", "--enable-expert-parallel"],
}
"""Flags of the engines whose ranks end; the embedded model has no experts, so a mixture with its words stands in."""
SLOW = pytest.mark.slow


def ranks_of(engine: int) -> list[int]:
    """The processes of an engine that are ranks."""
    return [
        each
        for each in children(engine)
        if b"quire.engine.processes.rank" in Path(f"/proc/{each}/cmdline").read_bytes()
    ]


def end_one(server: Chaos, rng: random.Random, how: signal.Signals) -> list[int]:
    """End a rank, which may be the first, that schedules; returns those of its engine."""
    engine = server.engine
    group = [engine, *ranks_of(engine)]
    assert len(group) > 1
    os.kill(rng.choice(group), how)
    return group


def mixture(folder: Path) -> Path:
    """A random model of experts that speaks the embedded model's words."""
    write(
        folder, "olmoe", vocab_size=6144, max_position_embeddings=1024, num_experts=6, num_experts_per_tok=2,
        bos_token_id=None, eos_token_id=4, pad_token_id=4,
    )  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    return folder


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("layout", [pytest.param(each, marks=SLOW) for each in LAYOUTS])
def test_ranks_that_are_ended_lose_nothing(layout: str, how: signal.Signals, tmp_path: Path) -> None:
    model = [str(mixture(tmp_path))] if layout == "experts 2" else []
    server = Chaos(*model, *LAYOUTS[layout], "--watchdog-timeout", "2", "--threads", "1")
    rng = random.Random(layout)
    with served(server) as (client, asked, alone):
        load, pauses = Load(client, asked), Pauses()
        for kill in range(KILLS):
            wait_for_more(client, 20 * STREAMS)
            began = time.monotonic()
            group = end_one(server, rng, how)
            wait_until(lambda kill=kill: restarts(client) > kill, seconds=120)  # type: ignore[misc]
            pauses.seconds.append(time.monotonic() - began)
            wait_until(lambda group=group: not any(alive(each) for each in group), seconds=30)  # type: ignore[misc]
        load.finish(alone)
        assert restarts(client) == KILLS and metric(client, "vllm:num_requests_running") == 0
    pauses.told(f"{layout}, {how.name}")


def alive(process: int) -> bool:
    """Whether it runs or is stopped; one that was ended and nobody asked for yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@SLOW
def test_replicas_that_are_killed_lose_nothing() -> None:
    server = Chaos("--data-parallel-size", "2", "--threads", "1")
    with served(server) as (client, asked, alone):
        load, pauses = Load(client, asked), Pauses()
        for kill in range(KILLS):
            wait_for_more(client, 20 * STREAMS)
            began = time.monotonic()
            os.kill(random.Random(kill).choice(server.engines()), signal.SIGKILL)
            wait_until(lambda kill=kill: all_restarts(client) > kill, seconds=120)  # type: ignore[misc]
            pauses.seconds.append(time.monotonic() - began)
        load.finish(alone)
    pauses.told("replicas")


def all_restarts(client: httpx.Client) -> int:
    """Of all replicas together."""
    lines = client.get("/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("quire:engine_restarts_total{"))
