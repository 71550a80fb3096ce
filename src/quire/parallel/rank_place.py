"""Where a process is among the ranks of an engine, and what it exchanges with whom."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.parallel.comm import Comm
from quire.parallel.experts import NOT_DIVIDED, Division, ExpertPlan
from quire.parallel.shared import SharedComm, comm_bytes, shared_memory
from quire.parallel.topology import AXES, ONE_RANK, Topology

NBYTES = 8 * 64
"""Bytes of the memory of `BusyTimes`."""


class BusyTimes:
    """`seconds` [world]: time that ranks spent in steps and not in waiting for each other; each writes its own.

    They lie in memory that all ranks see.
    """

    def __init__(self, file: int, world: int) -> None:
        """`file`: a descriptor of `NBYTES` zeros."""
        self.seconds = np.frombuffer(mmap.mmap(file, NBYTES), np.float64)[:world]


@dataclass(frozen=True)
class RankPlace:
    """Rank `rank` of `topology`. `comms`: by axis, the group of ranks that differ from this one along it alone.

    An axis of one rank has none; a place without any is a share of a model by itself. `experts`: how they are divided.
    """

    topology: Topology = ONE_RANK
    rank: int = 0
    comms: Mapping[str, Comm] = field(default_factory=dict)
    experts: ExpertPlan = NOT_DIVIDED

    def along(self, axis: str) -> int:
        """The place along `axis`."""
        return self.topology.along(self.rank, axis)

    def ends(self, axis: str) -> bool:
        """Whether it is the last along `axis`."""
        return self.along(axis) == int(getattr(self.topology, axis)) - 1

    def comm(self, axis: str) -> Comm | None:
        """What joins the ranks along `axis`, or None where there is one."""
        return self.comms.get(axis)

    @property
    def division(self) -> Division | None:
        """Part of this rank in how experts are divided, or None where every rank has all."""
        axis = self.experts.axis
        return Division(self.along(axis), getattr(self.topology, axis), self.experts) if axis else None


ALONE = RankPlace()


class SharedFiles:
    """What ranks on one host share: a file for all of them, and one for each group along an axis.

    Descriptors of this process; `close` them once everybody has mapped what is his.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.world = shared_memory(comm_bytes(topology.world))
        self.busy = shared_memory(NBYTES)
        self._groups: dict[tuple[int, ...], int] = {}

    def of(self, rank: int) -> dict[str, int]:
        """The files of the groups that `rank` is in, by axis."""
        groups = {axis: self.topology.group(rank, axis) for axis in AXES}
        return {axis: self._file(group) for axis, group in groups.items() if len(group) > 1}

    def close(self) -> None:
        """Give the descriptors back; what is mapped stays."""
        for file in (self.world, self.busy, *self._groups.values()):
            os.close(file)

    def _file(self, group: tuple[int, ...]) -> int:
        if group not in self._groups:
            self._groups[group] = shared_memory(comm_bytes(len(group)))
        return self._groups[group]


def place_of(
    topology: Topology,
    rank: int,
    files: Mapping[str, int],
    crowded: bool,
    experts: ExpertPlan,
    world: SharedComm | None = None,
) -> RankPlace:
    """The place of `rank`, whose groups share `files`. `world`: all ranks, one of which leaving ends every group."""
    sizes = {axis: len(topology.group(rank, axis)) for axis in files}
    comms = {
        axis: SharedComm(file, topology.along(rank, axis), sizes[axis], crowded, within=world)
        for axis, file in files.items()
    }
    return RankPlace(topology, rank, comms, experts)


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
    """The place of `rank` among ranks on several `hosts`: memory joins those of one host, else what reaches them.

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
