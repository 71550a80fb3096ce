"""How the ranks of an engine come to be and reach each other: in memory on one host, over links between several."""

from __future__ import annotations

from quire.core.config import EngineConfig
from quire.core.machine import cores
from quire.ops.lazy import require_torch
from quire.parallel.experts import ExpertPlan, expert_plan
from quire.parallel.rank_place import BusyTimes, RankPlace, SharedFiles, place_of
from quire.parallel.shared import SharedComm
from quire.parallel.topology import Topology, topology_of
from quire.run.gpu_ranks import comms_of, meeting_place, on_gpus
from quire.run.messages import Start
from quire.run.rank_connections import CommandReceiver, RankConnections, start_all


def reach(config: EngineConfig) -> RankConnections:
    """All other ranks, started."""
    topology, experts = topology_of(config.parallel), expert_plan(config.parallel)
    crowded = config.processes * max(1, config.device.threads) > cores().threads
    if len(set(config.hosts_of_ranks)) > 1:
        require_torch("an engine whose ranks are on several hosts", "train")
        from quire.run.multi_host import over_hosts

        return over_hosts(config, topology, experts, crowded)
    return _on_one_host(config, topology, experts, crowded)


def _on_one_host(config: EngineConfig, topology: Topology, experts: ExpertPlan, crowded: bool) -> RankConnections:
    memory, meet = SharedFiles(topology), meeting_place() if on_gpus(config) else ""
    own = memory.of(0)
    replying = SharedComm(own["pipeline"], 0, topology.pipeline, True) if topology.pipeline > 1 else None
    starts = [Start(config, rank, crowded, experts, meet=meet) for rank in range(1, topology.world)]
    others = start_all(starts, memory)
    place = place_of(topology, 0, own, crowded, experts) if not meet else among_gpus(starts[0], 0, topology)
    made = RankConnections(
        SharedComm(memory.world, 0, topology.world, crowded),
        place,
        others,
        replying,
        BusyTimes(memory.busy, topology.world).seconds,
    )
    memory.close()
    return made


def among_gpus(start: Start, rank: int, topology: Topology) -> RankPlace:
    """The place of a rank that has a GPU; all come here at once."""

    return RankPlace(topology, rank, comms_of(start.meet, rank, topology), start.experts)


def joined(start: Start) -> tuple[CommandReceiver, RankPlace]:
    """The side of a rank that is not the first."""
    topology = topology_of(start.config.parallel)
    if start.meeting is None:
        ahead = topology.pipeline > 1
        world = SharedComm(start.world, start.rank, topology.world, start.crowded or ahead)
        if start.meet:
            from quire.run.gpu_ranks import take_gpu

            take_gpu(start.rank)
            return world, among_gpus(start, start.rank, topology)
        return world, place_of(topology, start.rank, start.groups, start.crowded, start.experts)
    from quire.run.multi_host import met

    return met(start, topology)
