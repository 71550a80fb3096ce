"""Ranks on several hosts: where they meet, and their groups over torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec.structs import replace
from torch._C._distributed_c10d import Store

from quire.core.config import EngineConfig
from quire.core.files import sampled_digest
from quire.model.disk.checkpoint import resolve
from quire.parallel.comm import Comm
from quire.parallel.experts import ExpertPlan
from quire.parallel.host_messages import Hub, Spoke
from quire.parallel.launch import RemoteLauncher
from quire.parallel.link import dial
from quire.parallel.rank_place import BusyTimes, RankPlace, SharedFiles, place_among
from quire.parallel.rendezvous_store import RemoteStore, serve
from quire.parallel.topology import Topology
from quire.parallel.torch_distributed import ArrayComm, DistributedComm, gloo_group
from quire.parallel.wire import ConnectionDropped, listen, read_secret
from quire.run.messages import Rendezvous, Start
from quire.run.rank_connections import CommandReceiver, RankConnections, host_is_gone, start_all
from quire.store.hub import hub_beside

MEET_SECONDS = 120.0
"""That all ranks may take to be there, before any of them loads."""


def over_hosts(config: EngineConfig, topology: Topology, experts: ExpertPlan, crowded: bool) -> RankConnections:
    """All other ranks, started on their hosts, as seen by rank 0."""
    hosts, own = config.hosts_of_ranks, config.cluster.node_rank
    address, secret = config.hosts[own][0], _secret(config)
    gates = [listen(address, 0) for _ in range(2)]
    meeting = Rendezvous(hosts, address, gates[0].getsockname()[1], gates[1].getsockname()[1])
    weights = sampled_digest(resolve(config.model.model, hub_beside(config.model)))
    starts = [Start(config, rank, crowded, experts, meeting, weights) for rank in range(1, topology.world)]
    memory = SharedFiles(topology)
    others = start_all([start for start in starts if hosts[start.rank] == own], memory)
    for host in sorted(set(hosts) - {own}):
        line = msgspec.json.encode([start for start in starts if hosts[start.rank] == host])
        try:
            others.append(RemoteLauncher(dial(config.hosts[host], secret), "ranks", line))
        except ConnectionDropped as dropped:
            host_is_gone(dropped.message)
    with ThreadPoolExecutor(1) as pool:  # who comes first is greeted at once at both
        storing = pool.submit(serve, gates[1], secret, topology.world, MEET_SECONDS)
        hub = Hub(gates[0], secret, topology.world, MEET_SECONDS)
        store = storing.result()
    place = _among(replace(starts[0], rank=0, groups=memory.of(0)), topology, hosts, store)
    busy = BusyTimes(memory.busy, topology.world).seconds
    for gate in gates:
        gate.close()
    memory.close()
    return RankConnections(hub, place, others, place.comm("pipeline"), busy)


def met(start: Start, topology: Topology) -> tuple[CommandReceiver, RankPlace]:
    """The side of a rank that is not the first."""
    assert start.meeting is not None, "ranks of one host meet in memory"
    at, secret = start.meeting, _secret(start.config)
    spoke = Spoke(at.address, at.port, secret, start.rank, topology.world, MEET_SECONDS)
    store = RemoteStore(at.address, at.store, secret, start.rank, topology.world, MEET_SECONDS)
    return spoke, _among(start, topology, at.hosts, store)


def _among(start: Start, topology: Topology, hosts: Sequence[int], store: Store) -> RankPlace:
    """The place of a rank, with its groups; all ranks come here at once."""
    address, rank = start.config.hosts[hosts[start.rank]][0], start.rank

    def across(name: str, along: int, world: int) -> Comm:
        return ArrayComm(DistributedComm(gloo_group(store, name, along, world, address, MEET_SECONDS)))

    return place_among(topology, rank, hosts, start.groups, across, start.crowded, start.experts)


def _secret(config: EngineConfig) -> bytes:
    return read_secret(Path(config.cluster.cluster_secret_file or ""))
