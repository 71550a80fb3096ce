"""Groups along each axis: in memory on one host, over gloo between hosts, and what one rank's end does to all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from group import check_sums
from oracle import BACKENDS, backend
from quire.parallel.experts import NOT_DIVIDED
from quire.parallel.rank_place import SharedFiles, on_one_host, place_among, place_of
from quire.parallel.shared import SharedComm
from quire.parallel.topology import Topology
from quire.parallel.torch_distributed import DistributedComm, gloo_group

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


def test_each_axis_has_what_reaches_its_ranks() -> None:
    topology, hosts, ops = Topology(pipeline=2, tensor=2), (0, 0, 1, 1), backend("reference")
    memories, store = [SharedFiles(topology) for _ in range(2)], torch.distributed.HashStore()

    def across(name: str, rank: int, world: int) -> DistributedComm:
        return DistributedComm(gloo_group(store, name, rank, world, "127.0.0.1"))

    def work(rank: int) -> dict[str, Any]:
        place = place_among(topology, rank, hosts, memories[hosts[rank]].of(rank), across, True, NOT_DIVIDED)
        for _, comm in sorted(place.comms.items()):
            check_sums(comm, ops, (2, 3), 5)
        return {axis: (type(comm), comm.rank, comm.recordable) for axis, comm in place.comms.items()}

    files = [[memory.of(rank) for rank in range(4)] for memory in memories]
    assert files[0][0]["tensor"] == files[0][1]["tensor"] != files[0][2]["tensor"]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    for rank, comms in enumerate(found):
        assert comms == {"pipeline": (DistributedComm, rank // 2, False), "tensor": (SharedComm, rank % 2, True)}
        assert on_one_host(topology, rank, "tensor", hosts) and not on_one_host(topology, rank, "pipeline", hosts)
    for memory in memories:
        memory.close()


def test_a_rank_that_leaves_ends_every_group() -> None:
    topology, ops = Topology(pipeline=2, tensor=2), backend("reference")
    memory = SharedFiles(topology)
    worlds = [SharedComm(memory.world, rank, 4, crowded=True) for rank in range(4)]
    places = [place_of(topology, rank, memory.of(rank), True, NOT_DIVIDED, worlds[rank]) for rank in range(4)]
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(place.comms["tensor"].all_reduce, ops, torch.ones(1, 4)) for place in places[2:3]]
        waiting.append(pool.submit(places[0].comms["pipeline"].recv, ops, torch.ones(4), 1))
        waiting.append(pool.submit(worlds[1].hear, 60_000))
        worlds[3].leave()
        for each in waiting:
            with pytest.raises(ValueError, match="a rank of the group has ended"):
                each.result(timeout=30)
    memory.close()
