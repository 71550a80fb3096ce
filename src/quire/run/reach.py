"""How the ranks of an engine come to be and reach each other: in memory on one host, over links between several."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from torch._C._distributed_c10d import Store

from quire.core.config import EngineConfig
from quire.core.files import sampled_digest
from quire.core.machine import cores
from quire.model.disk.checkpoint import resolve
from quire.model.disk.hub import hub_beside
from quire.parallel.busy import Busy
from quire.parallel.comm import Comm
from quire.parallel.digest import Listening, Saying
from quire.parallel.experts import ExpertPlan, expert_plan
from quire.parallel.gloo import DistributedComm, gloo_group
from quire.parallel.groups import place_among
from quire.parallel.launch import LOST, Elsewhere, Launched, Process
from quire.parallel.link import dial
from quire.parallel.mail import Hub, Spoke
from quire.parallel.place import Memory, Place, place_of
from quire.parallel.shared import SharedComm
from quire.parallel.store import AskedStore, serve
from quire.parallel.topology import Topology, topology_of
from quire.parallel.wire import Dropped, listen, read_secret
from quire.run.gpu_ranks import comms_of, meeting_place, on_gpus, take_gpu
from quire.run.messages import Meeting, Start

RANK = "quire.engine.life.rank"
"""What the other processes run."""
MEET_SECONDS = 120.0
"""That all ranks may take to be there, before any of them loads."""


class Teller(Listening, Protocol):
    """Rank 0's way to all others."""

    def tell(self, message: bytes) -> None:
        """Say something to all of them."""

    def leave(self) -> None:
        """Nobody waits any more."""


class Hearer(Saying, Protocol):
    """Another rank's way to hear rank 0."""

    def hear(self, milliseconds: int) -> bytes | None:
        """What it says next, or None when it says nothing for so long."""


@dataclass
class Reach:
    """Rank 0's side. `others`: processes, or what stands for those of a host; `replying`: what only hears replies of
    the last of several stages; `busy`: seconds that each rank of this host computed."""

    world: Teller
    place: Place
    others: list[Launched]
    replying: Comm | None
    busy: NDArray[np.float64]


def reach(config: EngineConfig) -> Reach:
    """All other ranks, started."""
    topology, experts = topology_of(config.parallel), expert_plan(config.parallel)
    crowded = config.processes * max(1, config.device.threads) > cores().threads
    over = len(set(config.hosts_of_ranks)) > 1
    return (_over_hosts if over else _on_one_host)(config, topology, experts, crowded)


def _on_one_host(config: EngineConfig, topology: Topology, experts: ExpertPlan, crowded: bool) -> Reach:
    memory, meet = Memory(topology), meeting_place() if on_gpus(config) else ""
    own = memory.of(0)
    replying = SharedComm(own["pipeline"], 0, topology.pipeline, True) if topology.pipeline > 1 else None
    starts = [Start(config, rank, crowded, experts, meet=meet) for rank in range(1, topology.world)]
    others = start_all(starts, memory)
    place = place_of(topology, 0, own, crowded, experts) if not meet else among_gpus(starts[0], 0, topology)
    made = Reach(
        SharedComm(memory.world, 0, topology.world, crowded),
        place,
        others,
        replying,
        Busy(memory.busy, topology.world).seconds,
    )
    memory.close()
    return made


def among_gpus(start: Start, rank: int, topology: Topology) -> Place:
    """The place of a rank that has a GPU; all come here at once."""
    return Place(topology, rank, comms_of(start.meet, rank, topology), start.experts)


def _over_hosts(config: EngineConfig, topology: Topology, experts: ExpertPlan, crowded: bool) -> Reach:
    hosts, own = config.hosts_of_ranks, config.cluster.node_rank
    address, secret = config.hosts[own][0], _secret(config)
    gates = [listen(address, 0) for _ in range(2)]
    meeting = Meeting(hosts, address, gates[0].getsockname()[1], gates[1].getsockname()[1])
    weights = sampled_digest(resolve(config.model.model, hub_beside(config.model)))
    starts = [Start(config, rank, crowded, experts, meeting, weights) for rank in range(1, topology.world)]
    memory = Memory(topology)
    others = start_all([start for start in starts if hosts[start.rank] == own], memory)
    for host in sorted(set(hosts) - {own}):
        line = msgspec.json.encode([start for start in starts if hosts[start.rank] == host])
        try:
            others.append(Elsewhere(dial(config.hosts[host], secret), "ranks", line))
        except Dropped as dropped:
            host_is_gone(dropped.message)
    with ThreadPoolExecutor(1) as pool:  # who comes first is greeted at once at both
        storing = pool.submit(serve, gates[1], secret, topology.world, MEET_SECONDS)
        hub = Hub(gates[0], secret, topology.world, MEET_SECONDS)
        store = storing.result()
    place = _among(replace(starts[0], rank=0, groups=memory.of(0)), topology, hosts, store)
    busy = Busy(memory.busy, topology.world).seconds
    for gate in gates:
        gate.close()
    memory.close()
    return Reach(hub, place, others, place.comm("pipeline"), busy)


def start_all(starts: Sequence[Start], memory: Memory) -> list[Launched]:
    """Processes of this host, which share `memory`."""
    made: list[Launched] = []
    for start in starts:
        groups = memory.of(start.rank)
        tied = threading.current_thread() is threading.main_thread()
        start = replace(start, world=memory.world, groups=groups, busy=memory.busy, tied=tied)
        files = memory.world, memory.busy, *groups.values()
        made.append(Process(RANK, msgspec.json.encode(start), files=files))
    return made


def joined(start: Start) -> tuple[Hearer, Place]:
    """The side of a rank that is not the first."""
    topology, config = topology_of(start.config.parallel), start.config
    if start.meeting is None:
        ahead = topology.pipeline > 1
        world = SharedComm(start.world, start.rank, topology.world, start.crowded or ahead)
        if start.meet:
            take_gpu(start.rank)
            return world, among_gpus(start, start.rank, topology)
        return world, place_of(topology, start.rank, start.groups, start.crowded, start.experts)
    at, secret = start.meeting, _secret(config)
    spoke = Spoke(at.address, at.port, secret, start.rank, topology.world, MEET_SECONDS)
    store = AskedStore(at.address, at.store, secret, start.rank, topology.world, MEET_SECONDS)
    return spoke, _among(start, topology, at.hosts, store)


def host_is_gone(why: str) -> None:
    """End this process at once, so that nobody waits in vain: whoever started it knows that it is nobody's fault."""
    print(f"quire: {why}", file=sys.stderr, flush=True)
    os._exit(LOST)


def _among(start: Start, topology: Topology, hosts: Sequence[int], store: Store) -> Place:
    """The place of a rank, with its groups; all ranks come here at once."""
    address, rank = start.config.hosts[hosts[start.rank]][0], start.rank

    def across(name: str, along: int, world: int) -> Comm:
        return DistributedComm(gloo_group(store, name, along, world, address, MEET_SECONDS))

    return place_among(topology, rank, hosts, start.groups, across, start.crowded, start.experts)


def _secret(config: EngineConfig) -> bytes:
    return read_secret(Path(config.cluster.cluster_secret_file or ""))
