"""Hosts by Ray: a real cluster of three raylets on this machine, one of which is killed under load.

Slow, and skipped where Ray is not installed (pip install 'quire[ray]').
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from chaos_load import STREAMS, Load, bodies, restarts, texts_of, wait_for_more
from live_server import wait_until
from oracle import BACKENDS
from serving_process import Serving, children, listening

ray = pytest.importorskip("ray", reason="Ray is not installed; pip install 'quire[ray]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built"),
]
LOOPBACK = ("0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F")
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 as the kernel writes them."""


@contextmanager
def cluster() -> Iterator[Any]:
    """A head that runs nothing of ours and two nodes, on loopback."""
    from ray.cluster_utils import Cluster

    common = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **common})
    try:
        made.nodes = [made.add_node(num_cpus=2, wait=False, **common) for _ in range(2)]
        made.wait_for_nodes()
        made.common = common
        yield made
    finally:
        made.shutdown()


def serving(folder: Path, *words: str) -> Serving:
    secret = folder / "secret"
    secret.write_text(os.urandom(32).hex())
    secret.chmod(0o600)
    return Serving(
        "--distributed-executor-backend", "ray", "--cluster-secret-file", str(secret), "--num-blocks", "400", *words
    )  # fmt: skip


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return [*found, *(each for child in found for each in descendants(child))]


def test_kill_9_of_a_raylet_loses_nothing(tmp_path: Path) -> None:
    with cluster() as made:
        words = ["--ray-address", made.address, "--nnodes", "2", "--data-parallel-size", "2"]
        with serving(tmp_path, *words) as server:
            wait_until(lambda: "serving" in "".join(server.log), seconds=200)
            with server.up() as client:
                client.timeout = httpx.Timeout(300.0)
                asked = bodies(STREAMS)
                alone = [texts_of(client.post("/v1/completions", json=body)) for body in asked]
                load = Load(client, asked)
                wait_for_more(client, 10 * STREAMS)
                raylet = made.nodes[1].all_processes["raylet"][0].process
                raylet.kill()
                raylet.wait()  # its workers look whether its number is still there
                wait_until(lambda: "is gone" in "".join(server.log), seconds=120)
                wait_for_more(client, 10 * STREAMS)
                made.add_node(num_cpus=2, **made.common)
                wait_until(lambda: restarts(client) == 1, seconds=200)
                wait_for_more(client, 10 * STREAMS)
                load.finish(alone)
    assert "Traceback" not in "".join(line for line in server.log if "quire" in line)


def test_a_ray_of_our_own_is_on_loopback_and_has_no_dashboard(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        wait_until(lambda: "serving" in "".join(server.log), seconds=200)
        with server.up() as client:
            assert client.post("/v1/completions", json={"prompt": "def", "max_tokens": 4}).status_code == 200
            pids = [server.process.pid, *descendants(server.process.pid)]
            where = {address for pid in pids for address in listening(pid)}
            assert where and all(address.startswith(LOOPBACK) for address in where), where
            assert not any(address.endswith(f":{8265:04X}") for address in where), "the dashboard"
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(60) == 0
