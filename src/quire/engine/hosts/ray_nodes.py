"""Hosts that Ray chooses and watches: on each an actor that is the agent there, and started again where it dies.

Ray carries two things, a line of JSON to an actor and its address back. Ray pickles what actors are called with, and
whoever can speak to a Ray cluster can run code in it: what clients send, tokens and weights go over our own links.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.hosts.agent import Agent
from quire.parallel.link import Address, address_of
from quire.parallel.wire import read_secret

logger = logging.getLogger("quire.cluster")

ANSWER_SECONDS = 2.0
STORE_BYTES = 80 << 20
"""Of Ray's object store, where we start Ray: nearly the least it takes, as nothing is put there."""
START_SECONDS = 60.0


class RayHost:
    """What Ray runs on a host."""

    def __init__(self, config: str) -> None:
        import ray.util

        logging.basicConfig(level=logging.INFO)
        known = msgspec.json.decode(config, type=EngineConfig)
        interface = known.cluster.interface
        self._agent = Agent(known, (address_of(interface) if interface else ray.util.get_node_ip_address(), 0))

    def address(self) -> tuple[str, int]:
        """Where its agent listens."""
        return self._agent.address


class RayNodes:
    """`Nodes` of a Ray cluster: one that runs already, or one on this host alone, started here."""

    def __init__(self, config: EngineConfig) -> None:
        """`ConfigError` where there is no Ray, or no such cluster, or it has too few hosts."""
        try:
            import ray
        except ImportError:
            why = "--distributed-executor-backend ray: Ray is not installed; pip install 'quire[ray]'"
            raise ConfigError(why, param="distributed_executor_backend") from None
        self._ray: Any = ray
        cluster = config.cluster
        read_secret(Path(cluster.cluster_secret_file or ""))
        self._connect(cluster.ray_address)
        here = config.processes
        self._share = {"CPU": float(here * max(1, config.device.threads))}
        self._share |= {"GPU": float(here)} if config.device.device == "cuda" else {}
        self._group = self._reserve(cluster.nnodes)
        self._hosts = [self._start(node, config) for node in range(cluster.nnodes)]

    def address(self, node: int) -> Address | None:
        """Implement `Nodes`."""
        with contextlib.suppress(self._ray.exceptions.RayError):  # it is being started again
            host, port = self._ray.get(self._hosts[node].address.remote(), timeout=ANSWER_SECONDS)
            return host, port
        return None

    def close(self) -> None:
        """Implement `Nodes`: a cluster that was started here ends."""
        for host in self._hosts:
            self._ray.kill(host)
        self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()

    def _connect(self, address: str | None) -> None:
        from ray._private import ray_constants

        # Else Ray takes another address for loopback, and listens at all of them for hosts that never come.
        loopback = address is None or address.startswith(("127.", "localhost:", "[::1]"))
        ray_constants.ENABLE_RAY_CLUSTER = not loopback
        started = {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "object_store_memory": STORE_BYTES}
        try:
            self._ray.init(address=address or "local", **({} if address else started))
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"--ray-address {address}: {error}", param="ray_address") from None

    def _reserve(self, nodes: int) -> Any:
        """Room on as many hosts; an engine takes a share of a host's memory, so no two share one."""
        group = self._ray.util.placement_group([self._share] * nodes, "STRICT_SPREAD")
        ready, _ = self._ray.wait([group.ready()], timeout=START_SECONDS)
        if not ready:
            there = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            self._ray.util.remove_placement_group(group)
            self._ray.shutdown()
            raise ConfigError(
                f"--nnodes {nodes}: Ray has no room of {self._share} on each of so many hosts; it has {there}",
                param="nnodes",
            )
        return group

    def _start(self, node: int, config: EngineConfig) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=node
        )
        kind = self._ray.remote(RayHost)
        gpus = self._share.get("GPU", 0.0)
        options = {"num_cpus": self._share["CPU"], "num_gpus": gpus, "max_restarts": -1, "max_concurrency": 2}
        own = replace(config, cluster=replace(config.cluster, node_rank=node))
        return kind.options(scheduling_strategy=strategy, **options).remote(msgspec.json.encode(own).decode())
