"""Ranks that are threads or forks of a test, and what each collective of any `Comm` has to give them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from quire.ops.backend import Ops
from quire.parallel.comm import Comm
from quire.parallel.rendezvous_store import RemoteStore, serve
from quire.parallel.shared import SharedComm, comm_bytes, shared_memory
from quire.parallel.torch_distributed import DistributedComm, gloo_group
from quire.parallel.wire import listen


def each(world: int, work: Callable[[SharedComm], Any], crowded: bool = True) -> list[Any]:
    """What `work` returns on each of `world` ranks, which are threads."""
    file = shared_memory(comm_bytes(world))
    try:
        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(lambda rank: work(SharedComm(file, rank, world, crowded)), range(world)))
    finally:
        os.close(file)


def forks(world: int, work: Callable[[SharedComm], Any]) -> list[int]:
    """Exit codes of `world` ranks, which are processes: 0 where `work` did not raise."""
    file, children = shared_memory(comm_bytes(world)), []
    for rank in range(world):
        child = os.fork()
        if not child:
            comm = SharedComm(file, rank, world, crowded=True, patience_s=60)
            try:
                work(comm)
            except BaseException:
                traceback.print_exc()
                comm.leave()
                os._exit(1)
            os._exit(0)
        children.append(child)
    os.close(file)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def part(rank: int, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank has: any rank can make any other's."""
    g = torch.Generator().manual_seed(1000 * rank + rows * 31 + width)
    if dtype.is_floating_point:
        return torch.randn(rows, width, generator=g, dtype=torch.float32).to(dtype)
    return torch.randint(-1000, 1000, (rows, width), generator=g, dtype=dtype)


def summed(world: int, rows: int, width: int) -> Tensor:
    """The parts of all ranks, added in their order."""
    total = part(0, rows, width)
    for rank in range(1, world):
        total += part(rank, rows, width)
    return total


def check_sums(comm: Comm, ops: Ops, rows: tuple[int, ...], width: int) -> None:
    """`rows`: how many of the sum's each rank gets."""
    want, own, first = summed(comm.world, sum(rows), width), part(comm.rank, sum(rows), width), sum(rows[: comm.rank])
    x = own.clone()
    found = comm.reduce_scatter(ops, x, rows)
    assert torch.equal(found, want[first : first + rows[comm.rank]]) and torch.equal(x, own)
    assert comm.all_reduce(ops, x) is x and torch.equal(x, want)


def check_gathers(comm: Comm, ops: Ops, sizes: tuple[int, ...], other: int, dtype: torch.dtype) -> None:
    """`sizes`: rows or columns of each rank, `other`: columns or rows."""
    below = comm.all_gather(ops, part(comm.rank, sizes[comm.rank], other, dtype), sizes)
    assert torch.equal(below, torch.cat([part(i, size, other, dtype) for i, size in enumerate(sizes)]))
    beside = comm.gather_columns(ops, part(comm.rank, other, sizes[comm.rank]), sizes)
    assert torch.equal(beside, torch.cat([part(i, other, size) for i, size in enumerate(sizes)], 1))


def check_broadcast(comm: Comm, ops: Ops, rows: int, width: int, dtype: torch.dtype) -> None:
    """From every rank in turn."""
    for root in range(comm.world):
        x = part(comm.rank, rows, width, dtype)
        assert comm.broadcast(ops, x, root) is x and torch.equal(x, part(root, rows, width, dtype))


def check_all_to_all(comm: Comm, ops: Ops, counts: list[list[int]], width: int, dtype: torch.dtype) -> None:
    """`counts` [from][to]: rows that move there; back again they lie as they did."""
    me, world = comm.rank, range(comm.world)
    most = max(max(sum(counts[i][to] for i in world) for to in world), max(map(sum, counts))) + 2
    x = part(me, sum(counts[me]) + 1, width, dtype)
    found, received = comm.all_to_all(ops, x, torch.tensor(counts[me], dtype=torch.int32), most)
    assert found.shape == (most, width) and received.tolist() == [counts[i][me] for i in world]
    want = []
    for i in world:
        starts = [*accumulate(counts[i], initial=0)]
        want.append(part(i, sum(counts[i]) + 1, width, dtype)[starts[me] : starts[me + 1]])
    assert torch.equal(found[: sum(received.tolist())], torch.cat(want))
    back, again = comm.all_to_all(ops, found, received, most)
    assert again.tolist() == counts[me] and torch.equal(back[: sum(counts[me])], x[: sum(counts[me])])


def check_round_trip(comm: Comm, ops: Ops, rows: int, width: int, dtype: torch.dtype) -> None:
    """Each rank's tensors go round the ring of ranks, two at a time."""
    after, before = (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world
    held = [part(comm.rank, rows, width, dtype), part(comm.rank, 1, 3, dtype)]
    for _ in range(comm.world):
        sent = held
        held = [torch.empty_like(x) for x in sent]
        for turn in (0, 1) if comm.rank else (1, 0):
            for i, x in enumerate(sent):
                if turn:
                    comm.send(ops, x, after)
                else:
                    assert comm.recv(ops, held[i], before) is held[i]
    assert torch.equal(held[0], part(comm.rank, rows, width, dtype))
    assert torch.equal(held[1], part(comm.rank, 1, 3, dtype))


def counts_of(world: int, most: int) -> list[list[int]]:
    """Rows from each rank to each: none, some, many."""
    return [[(7 * a + 3 * b + a * b) % (most + 1) if (a + b) % 3 else 0 for b in range(world)] for a in range(world)]


DTYPES = (torch.float32, torch.int32, torch.int64)


def check_everything(comm: Comm, ops: Ops, large: int) -> None:
    """Every collective in small, odd and no sizes, and with rows of `large` numbers."""
    world = comm.world
    uneven = tuple((3 * rank + 1) % 4 for rank in range(world))
    for parts, width in ((uneven, 5), ((0,) * world, 4), ((1,) * world, 1), (uneven, large)):
        check_sums(comm, ops, parts, width)
    for dtype in DTYPES:
        for other in (0, 1, 7, large):
            check_gathers(comm, ops, uneven, other, dtype)
        for rows, width in ((0, 3), (1, 1), (3, large)):
            check_broadcast(comm, ops, rows, width, dtype)
            check_round_trip(comm, ops, rows, width, dtype)
        for most, width in ((4, 3), (0, 2), (3, large)):
            check_all_to_all(comm, ops, counts_of(world, most), width, dtype)


SECRET = b"s" * 32


def each_over_gloo(world: int, work: Callable[[DistributedComm], Any], seconds: float = 30.0) -> list[Any]:
    """What `work` returns on each_over_gloo of `world` ranks, which are threads."""
    listener = listen("127.0.0.1", 0)

    def rank_of(rank: int) -> Any:
        host, port = listener.getsockname()
        if not rank:
            store = serve(listener, SECRET, world)
            return work(DistributedComm(gloo_group(store, "all", rank, world, "127.0.0.1", seconds)))
        with closing(RemoteStore(host, port, SECRET, rank, world)) as asked:
            group = gloo_group(asked, "all", rank, world, "127.0.0.1", seconds)
        return work(DistributedComm(group))

    try:
        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(rank_of, range(world)))
    finally:
        listener.close()
