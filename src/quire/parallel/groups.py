"""What joins a rank with the others of each axis: memory where all are on its host, else what reaches them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quire.parallel.comm import Comm
from quire.parallel.experts import ExpertPlan
from quire.parallel.rank_place import RankPlace
from quire.parallel.shared import SharedComm
from quire.parallel.topology import AXES, Topology


def on_one_host(topology: Topology, rank: int, axis: str, hosts: Sequence[int]) -> bool:
    """Whether all ranks of its group are where `rank` is. `hosts`: which host each rank is on."""
    return len({hosts[each] for each in topology.group(rank, axis)}) == 1


def place_among(
    topology: Topology,
    rank: int,
    hosts: Sequence[int],
    files: Mapping[str, int],
    across: Callable[[str, int, int], Comm],
    crowded: bool,
    experts: ExpertPlan,
    world: SharedComm | None = None,
) -> RankPlace:
    """The place of `rank` among ranks on several `hosts`.

    `files`: memory of this host for its groups (`SharedFiles.of`), by axis. `across(name, rank, world)` joins a group
    of that name over hosts: all of its members make it at once, each its axes in one order, so that nobody waits in
    turn. `world`: the ranks of this host, one of which leaving ends every group in memory.
    """
    comms: dict[str, Comm] = {}
    for axis in AXES:
        group, own = topology.group(rank, axis), topology.along(rank, axis)
        if len(group) == 1:
            continue
        if on_one_host(topology, rank, axis, hosts):
            comms[axis] = SharedComm(files[axis], own, len(group), crowded, within=world)
        else:
            comms[axis] = across(f"{axis} {group[0]}", own, len(group))
    return RankPlace(topology, rank, comms, experts)
