"""Where an engine runs: in a process of this host, or by the agent of another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from quire.core.config import EngineConfig
from quire.core.errors import EngineFailure
from quire.engine.channel import Channel, LocalChannel, RemoteChannel
from quire.engine.nodes import JoinedNodes
from quire.engine.ray_nodes import RayNodes
from quire.parallel.interface import address_of
from quire.parallel.link import Address, Link, dial, read_secret

logger = logging.getLogger("quire.cluster")

WAIT_SECONDS = 0.2


class Nodes(Protocol):
    """The hosts there are."""

    def address(self, node: int) -> Address | None:
        """Where the agent of a host listens now; None while none is known."""

    def close(self) -> None:
        """Leave them."""


def nodes_of(config: EngineConfig) -> Nodes | None:
    """The hosts that `config` speaks of, where there are others than this one."""
    if config.cluster.by_ray:
        return RayNodes(config)
    return JoinedNodes(config) if config.cluster.nnodes > 1 else None


class Placing:
    """Starts engines where they belong. `nodes`: None where all are here; `shards`: memory that those here share."""

    def __init__(self, config: EngineConfig, shards: int | None, nodes: Nodes | None) -> None:
        self._config, self._shards, self._nodes = config, shards, nodes
        self._secret = read_secret(config.cluster.cluster_secret_file or "") if nodes is not None else b""

    def starter(self, replica: int, given_up: Callable[[], bool]) -> Callable[[bytes], Channel]:
        """What starts the process of an engine, told a line."""
        config = self._config
        node = config.cluster.node_of(replica * config.parallel.ranks, config.parallel.processes)
        if self._nodes is None or (node == 0 and not config.cluster.by_ray):
            return partial(LocalChannel, shards=self._shards)
        return partial(self._start, self._nodes, node, given_up)

    def close(self) -> None:
        """Leave the hosts."""
        if self._nodes is not None:
            self._nodes.close()

    def _start(self, nodes: Nodes, node: int, given_up: Callable[[], bool], line: bytes) -> Channel:
        return RemoteChannel(self._link(nodes, node, given_up), f"host {node}", line)

    def _link(self, nodes: Nodes, node: int, given_up: Callable[[], bool]) -> Link:
        """To the agent of a host, once it is there."""
        cluster, pause, told = self._config.cluster, threading.Event(), False
        source = address_of(cluster.interface) if cluster.interface else None
        while not given_up():
            address = nodes.address(node)
            if address is not None:
                try:
                    return dial(address, self._secret, source)
                except OSError as error:
                    logger.debug("host %d at %s:%d: %s", node, *address, error)
            if not told:
                logger.info("waiting for host %d", node)
                told = True
            pause.wait(WAIT_SECONDS)
        raise EngineFailure(f"host {node} was given up while it was waited for")
