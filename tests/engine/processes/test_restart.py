"""SIGUSR1: the engines of a server are started anew under load, one after the other, and no request is lost."""

from __future__ import annotations

import os
import signal

import httpx
import pytest

from chaos_load import STREAMS, Load, bodies, restarts, texts_of, wait_for_more
from live_server import wait_until
from oracle import BACKENDS
from serving_process import Serving

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_engines_are_started_anew_and_every_answer_is_as_alone(replicas: int) -> None:
    words = ["--data-parallel-size", str(replicas), "--num-blocks", "400", "--max-engine-deaths", "1"]
    with Serving(*words) as server, server.up() as client:
        client.timeout = httpx.Timeout(120.0)
        asked = bodies(STREAMS)
        alone = [texts_of(client.post("/v1/completions", json=body)) for body in asked]
        load, before = Load(client, asked), set(server.engines())
        wait_for_more(client, 20 * STREAMS)
        os.kill(server.process.pid, signal.SIGUSR1)
        wait_until(lambda: restarts(client) == replicas, seconds=60)
        wait_for_more(client, 20 * STREAMS)
        load.finish(alone)
        assert len(before) == replicas and not before & set(server.engines())
    assert "Traceback" not in "".join(server.log)
