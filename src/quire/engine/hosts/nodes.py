"""Where the other hosts are: each has an agent, which joins at host 0 and says where it listens."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import msgspec

import quire
from quire.core.config import EngineConfig
from quire.parallel.link import Address, Link, Listener, address_of
from quire.parallel.weight_shares import ASK, serve
from quire.parallel.wire import ConnectionDropped, read_secret

logger = logging.getLogger("quire.cluster")

POLL_SECONDS = 1.0


class NodeHello(msgspec.Struct, frozen=True, tag="hello"):
    """An agent says who it is, and where it listens."""

    version: str
    nnodes: int
    node_rank: int
    address: Address


class NodeAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """Host 0 takes an agent, unless it says why not."""

    refused: str = ""


class JoinedNodes:
    """Agents that have dialed host 0, which this is, and are there as long as their links are."""

    def __init__(self, config: EngineConfig, shards: int | None = None) -> None:
        """`shards`: this host's share of the weights. `ConfigError` where it cannot listen at --master-addr."""
        self._shards = shards
        self._cluster = cluster = config.cluster
        assert cluster.master_addr is not None and cluster.cluster_secret_file is not None, "validated"
        self._lock = threading.RLock()
        self._there: dict[int, tuple[Address, Link]] = {}
        self._closing = threading.Event()
        at = address_of(cluster.interface) if cluster.interface else cluster.master_addr
        self._listener = Listener(
            (at, cluster.master_port), read_secret(Path(cluster.cluster_secret_file)), self._serve
        )

    def address(self, node: int) -> Address | None:
        """Implement `Nodes`."""
        with self._lock:
            return self._there[node][0] if node in self._there else None

    def close(self) -> None:
        """Implement `Nodes`."""
        self._closing.set()
        self._listener.close()

    def _serve(self, link: Link) -> None:
        said = link.receive(POLL_SECONDS)
        if said == ASK and self._shards is not None:
            serve(link, self._shards)
        if said is None:
            return
        hello = msgspec.msgpack.decode(said, type=NodeHello)
        refused = self._enter(hello, link)
        link.send(msgspec.msgpack.encode(NodeAnswer(refused)))
        if refused:
            logger.error("%s was refused: %s", link.address[0], refused)
            return
        logger.info("host %d has joined: %s:%d", hello.node_rank, *hello.address)
        try:
            while not self._closing.is_set():
                link.receive(POLL_SECONDS)
        except ConnectionDropped as lost:
            logger.warning("host %d is gone: %s", hello.node_rank, lost)
        finally:
            with self._lock:
                if self._there[hello.node_rank][1] is link:
                    del self._there[hello.node_rank]

    def _enter(self, hello: NodeHello, link: Link) -> str:
        """Take an agent, or say why not. One at the same address has lost its link before this host noticed."""
        if hello.version != quire.__version__:
            return f"it runs quire {hello.version}, and host 0 {quire.__version__}"
        if hello.nnodes != self._cluster.nnodes or not 0 < hello.node_rank < hello.nnodes:
            return f"it is host {hello.node_rank} of {hello.nnodes}, and there are {self._cluster.nnodes}"
        with self._lock:
            before = self.address(hello.node_rank)
            if before not in (None, hello.address):
                return f"there is a host {hello.node_rank} already, at {before[0]}:{before[1]}"
            self._there[hello.node_rank] = hello.address, link
        return ""
