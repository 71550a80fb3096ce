"""Where an engine runs: in a process of this host, or by the agent of another."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, EngineFailure
from quire.core.files import LoadProgress
from quire.core.machine import memory_file
from quire.core.progress import loading_bar
from quire.engine.client import EngineInfo
from quire.engine.hosts.nodes import JoinedNodes
from quire.engine.hosts.ray_nodes import RayNodes
from quire.engine.processes.channel import Channel, LocalChannel, RemoteChannel
from quire.engine.processes.process import ProcessEngine
from quire.parallel.link import Address, Link, address_of, dial
from quire.parallel.wire import ConnectionDropped, read_secret

logger = logging.getLogger("quire.cluster")

WAIT_SECONDS = 0.2


class Nodes(Protocol):
    """The hosts there are."""

    def address(self, node: int) -> Address | None:
        """Where the agent of a host listens now; None while none is known."""

    def close(self) -> None:
        """Leave them."""


def nodes_of(config: EngineConfig, shards: int | None) -> Nodes | None:
    """The hosts that `config` speaks of, where there are others than this one, which has `shards` for them."""
    if config.cluster.by_ray:
        return RayNodes(config)
    return JoinedNodes(config, shards) if config.cluster.nnodes > 1 else None


SAME = ("vocab_size", "weights", "dtype", "quantization", "kv_cache_dtype", "backend", "isa", "implementations")
"""Facts on which the bits of an answer depend."""


def check_same(first: EngineInfo, other: EngineInfo, replica: int) -> None:
    """`ConfigError` where an engine would answer otherwise than the first: requests could not go on in the other."""
    for name in SAME:
        one, two = getattr(first, name), getattr(other, name)
        if one != two:
            hint = {"weights": "give all hosts the same files", "isa": "give --isa, or hosts of one kind"}.get(name, "")
            raise ConfigError(
                f"replica {replica} differs from replica 0, so that requests could not go on in the other: {name} is "
                f"{two!r} there and {one!r} here" + (f"; {hint}" if hint else ""),
                param="nnodes",
            )


def _progress() -> AbstractContextManager[LoadProgress | None]:
    """How far it is, where there is a standard error."""
    return nullcontext() if sys.stderr is None else loading_bar()


class Placing:
    """Starts engines where they belong."""

    def __init__(self, config: EngineConfig) -> None:
        self._shards = memory_file() if config.offload.fully_shard else None
        self._config, self._nodes = config, nodes_of(config, self._shards)
        self._closing = threading.Event()
        self._secret = read_secret(Path(config.cluster.cluster_secret_file or "")) if self._nodes is not None else b""
        self._first: EngineInfo | None = None

    @property
    def together(self) -> bool:
        """Whether engines must be started at once, as none is loaded without the others."""
        return self._shards is not None and self._config.cluster.nnodes > 1

    def start(self, replica: int, before: EngineInfo | None, given_up: Callable[[], bool]) -> ProcessEngine:
        """An engine whose model is loaded, with the limits of the one `before` it."""
        config, given_up = self._config, partial(self._given_up, given_up)
        place = self._place(replica, given_up)
        if config.parallel.ranks > config.processes or self.together:
            config = replace(config, hosts=self._all_hosts(given_up))
        if before is None and not (replica and self.together):
            with _progress() as progress:
                engine = ProcessEngine(config, progress, given_up, place)
        elif before is None:
            engine = ProcessEngine(config, None, given_up, place)
        else:
            model = replace(config.model, max_model_len=before.max_model_len)
            cache = replace(config.cache, num_blocks=before.num_blocks)
            engine = ProcessEngine(replace(config, model=model, cache=cache), None, given_up, place)
        self._first = self._first or engine.info
        try:
            check_same(self._first, engine.info, replica)
        except ConfigError:
            engine.close()
            raise
        return engine

    def close(self) -> None:
        """Leave the hosts; engines that are being started are given up."""
        self._closing.set()
        if self._nodes is not None:
            self._nodes.close()

    def _given_up(self, by_engine: Callable[[], bool]) -> bool:
        return self._closing.is_set() or by_engine()

    def _place(self, replica: int, given_up: Callable[[], bool]) -> Callable[[bytes], Channel]:
        """What starts the process of an engine, told a line."""
        config = self._config
        node = config.cluster.node_of(replica * config.parallel.ranks, config.parallel.processes)
        if self._nodes is None or (node == 0 and not config.cluster.by_ray):
            return partial(LocalChannel, shards=self._shards)
        return partial(self._start, self._nodes, node, given_up)

    def _start(self, nodes: Nodes, node: int, given_up: Callable[[], bool], line: bytes) -> Channel:
        return RemoteChannel(self._link(nodes, node, given_up), f"host {node}", line)

    def _all_hosts(self, given_up: Callable[[], bool]) -> tuple[Address, ...]:
        """Where all hosts are; without an agent, the first listens at an address only."""
        cluster, nodes = self._config.cluster, self._nodes
        assert nodes is not None, "ranks are as many as processes of a host, where there is one"
        port = cluster.master_port if self.together else 0  # this server's own, where others ask for its share
        first = () if cluster.by_ray else ((address_of(cluster.interface or cluster.master_addr or ""), port),)
        return (*first, *(self._wait(nodes, node, given_up) for node in range(len(first), cluster.nnodes)))

    def _wait(self, nodes: Nodes, node: int, given_up: Callable[[], bool]) -> Address:
        """Where a host's agent listens, once it is there."""
        told, pause = False, threading.Event()
        while not given_up():
            address = nodes.address(node)
            if address is not None:
                return address
            if not told:
                logger.info("waiting for host %d", node)
                told = True
            pause.wait(WAIT_SECONDS)
        raise EngineFailure(f"host {node} was given up while it was waited for")

    def _link(self, nodes: Nodes, node: int, given_up: Callable[[], bool]) -> Link:
        """Open a link to the agent of a host, once it is there."""
        while True:
            address = self._wait(nodes, node, given_up)
            try:
                return dial(address, self._secret)
            except ConnectionDropped as error:  # it has just gone
                logger.debug("host %d: %s", node, error)
