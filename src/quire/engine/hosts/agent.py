"""The agent of a host that is not the first: it joins at host 0 and runs what it is told to, each for one link.
See docs/design/replicas.md.

A process ends with its link. So what was lost by the other side, with a cable or a host, takes no memory here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

import quire
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, EngineFailure, QuireError
from quire.core.machine import memory_file
from quire.core.offload import FLUSH_SECONDS
from quire.engine.hosts.nodes import NodeAnswer, NodeHello
from quire.engine.processes.channel import LocalChannel, ended
from quire.parallel.launch import DATA, END_SECONDS, Kill, Launch, Order, ProcessExited, order
from quire.parallel.link import Address, Link, Listener, address_of, address_towards, dial
from quire.parallel.weight_shares import ASK, serve
from quire.parallel.wire import ConnectionDropped, read_secret

logger = logging.getLogger("quire.cluster")

POLL_SECONDS = 0.1
FIRST_SECONDS = 5.0
"""That whoever has dialed may take to say what it wants."""
AGAIN_SECONDS = 1.0


class Agent:
    """Listens for links, at one address, from who knows the secret. `config`: what this host was told itself."""

    def __init__(self, config: EngineConfig, address: Address) -> None:
        assert config.cluster.cluster_secret_file is not None, "validated"
        self._config = config
        self._decode = msgspec.msgpack.Decoder(Order).decode
        self._shards = memory_file() if config.offload.fully_shard else None
        self._listener = Listener(address, read_secret(Path(config.cluster.cluster_secret_file)), self._serve)

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self._listener.address

    def close(self) -> None:
        """Take no more links."""
        self._listener.close()

    def _serve(self, link: Link) -> None:
        said = link.receive(FIRST_SECONDS)
        if said == ASK and self._shards is not None:
            serve(link, self._shards)
        asked = said and self._decode(said[1:])
        if not isinstance(asked, Launch):
            return
        logger.info("%s:%d starts here: %s", *link.address, asked.kind)
        try:
            if asked.kind == "engine":
                told = self._own(msgspec.json.decode(asked.line, type=EngineConfig))
                _Relay(link, LocalChannel(msgspec.json.encode(told), self._shards), self._decode).run()
            elif asked.kind == "ranks":
                self._ranks(link, asked.line)
        except QuireError as error:
            link.send(order(ProcessExited(error.exit_code, error.message)))
        logger.info("ended for %s:%d: %s", *link.address, asked.kind)

    def _ranks(self, link: Link, line: bytes) -> None:
        """Run ranks of one engine until one of them, or the link, ends."""
        # Who only passes messages on has no use for these.
        from quire.parallel.rank_place import SharedFiles
        from quire.parallel.topology import topology_of
        from quire.run.messages import Start
        from quire.run.rank_connections import start_all

        starts = [replace(each, config=self._own(each.config)) for each in msgspec.json.decode(line, type=list[Start])]
        memory = SharedFiles(topology_of(starts[0].config.parallel))
        processes = start_all(starts, memory)
        memory.close()
        try:
            while not any(process.ended() for process in processes):
                link.receive(POLL_SECONDS)
            rank, code = next((s.rank, p.ended()) for s, p in zip(starts, processes, strict=True) if p.ended())
            link.send(order(ProcessExited(code or 0, f"rank {rank} has ended (exit code {code})")))
            link.receive(FIRST_SECONDS)  # it is the other side's to leave: nothing is lost that was sent
        finally:
            for process in processes:
                process.end()

    def _own(self, told: EngineConfig) -> EngineConfig:
        """What an engine is told, with what this host was told of its own files and network."""
        own = self._config
        model = replace(
            told.model,
            model=own.model.model or told.model.model,
            download_dir=own.model.download_dir,
            mmproj=own.model.mmproj or told.model.mmproj,
            cache_packed=own.model.cache_packed,
        )
        threads = own.device.threads or told.device.threads
        device = replace(told.device, threads=threads)
        return replace(told, model=model, device=device, cluster=own.cluster)


class _Relay:
    """Messages of a link to a process and back, until one of them ends, and with it the other."""

    def __init__(self, link: Link, channel: LocalChannel, decode: Callable[[bytes], Order]) -> None:
        self._link, self._channel, self._decode = link, channel, decode
        self._done = threading.Event()

    def run(self) -> None:
        """Return when both have ended."""
        reader = threading.Thread(target=self._read, name="quire-relay", daemon=True)
        reader.start()
        try:
            while not self._done.is_set():
                said = self._channel.receive(POLL_SECONDS)
                if said is not None:
                    self._link.send(DATA + said)
        except ConnectionDropped:
            pass
        except EngineFailure as failure:
            self._link.send(order(ended(failure)))
            reader.join(FIRST_SECONDS)  # it is the other side's to leave: nothing is lost that was sent
        finally:
            self._done.set()
            self._link.close()
            reader.join()
            self._channel.close(END_SECONDS + FLUSH_SECONDS)

    def _read(self) -> None:
        try:
            while not self._done.is_set():
                said = self._link.receive(POLL_SECONDS)
                if said is not None and said[:1] == DATA:
                    with contextlib.suppress(EngineFailure):  # it has ended, which `run` finds out
                        self._channel.send(said[1:])
                elif said is not None and isinstance(self._decode(said[1:]), Kill):
                    self._channel.kill()
        except ConnectionDropped:
            pass
        finally:
            self._done.set()


def run_agent(config: EngineConfig) -> None:
    """Be the agent of this host until a signal; joins host 0 again whenever the link to it was lost.

    `ConfigError` where host 0 refuses it.
    """
    cluster = config.cluster
    assert cluster.master_addr is not None and cluster.cluster_secret_file is not None, "validated"
    secret, master = read_secret(Path(cluster.cluster_secret_file)), (cluster.master_addr, cluster.master_port)
    pause = threading.Event()
    own = _own_address(cluster.interface, master, pause)
    agent = Agent(config, (own, cluster.master_port))
    logger.info("this is host %d at %s:%d", cluster.node_rank, *agent.address)
    told = ""
    try:
        while True:
            try:
                _stay(dial(master, secret), config, agent.address)
            except ConnectionDropped as error:
                if told != str(error):
                    logger.warning("host 0 at %s:%d: %s; tried again until it is there", *master, error)
                told = str(error)
            pause.wait(AGAIN_SECONDS)
    finally:
        agent.close()


def _own_address(interface: str | None, master: Address, pause: threading.Event) -> str:
    if interface is not None:
        return address_of(interface)
    while True:
        try:
            return address_towards(*master)
        except OSError as error:
            logger.warning("no way to host 0 at %s:%d yet: %s", *master, error)
            pause.wait(AGAIN_SECONDS)


def _stay(link: Link, config: EngineConfig, address: Address) -> None:
    """Join, and return when host 0 has left."""
    cluster = config.cluster
    try:
        hello = NodeHello(quire.__version__, cluster.nnodes, cluster.node_rank, address)
        link.send(msgspec.msgpack.encode(hello))
        said = link.receive(FIRST_SECONDS)
        answer = msgspec.msgpack.decode(said, type=NodeAnswer) if said is not None else NodeAnswer("it says nothing")
        if answer.refused:
            raise ConfigError(f"host 0 refuses this one: {answer.refused}", param="node_rank")
        logger.info("joined host 0 at %s:%d", *link.address)
        while True:
            link.receive(FIRST_SECONDS)
    finally:
        link.close()
