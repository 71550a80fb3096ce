"""What ranks exchange: every collective of `SharedComm`, between threads and processes, now and out of a recording."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from group import check_everything, check_sums, each, forks, part, summed
from oracle import BACKENDS, backend
from quire.ops.arrays import Host
from quire.parallel.comm import Comm
from quire.parallel.shared import PIECE, SLOT, SharedComm, comm_bytes, shared_memory

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


@pytest.mark.parametrize("world", [2, 3, 5])
def test_every_collective_between_threads(world: int) -> None:
    ops = backend("reference")
    each(world, lambda comm: check_everything(comm, ops, SLOT // 8 + 3))


@pytest.mark.parametrize("world", [2, 3])
def test_every_collective_between_processes(world: int) -> None:
    ops = backend("reference")
    assert forks(world, lambda comm: check_everything(comm, ops, SLOT // 4 + 5)) == [0] * world


def test_ranks_that_spin() -> None:
    ops = backend("reference")
    each(2, lambda comm: [check_sums(comm, ops, (3, i % 5), 7) for i in range(300)], crowded=False)


def test_a_recording_reads_new_counts() -> None:
    def work(comm: SharedComm) -> list[list[list[float]]]:
        ops, other = backend("cpu"), 1 - comm.rank
        x, sends = np.zeros((4, 2), np.float32), np.zeros(2, np.int32)
        passed = np.empty((1, 2), np.float32)

        def step() -> tuple[Host, Host]:
            found, received = comm.all_to_all(ops, x, sends, 8)
            comm.send(ops, x[:1], other)
            comm.recv(ops, passed, other)
            return found, received

        recorded, seen = ops.record(step), []
        for i in range(1, 4):
            x.fill(10 * comm.rank + i)
            sends[:] = i % 3, 2 - i % 2
            found, received = recorded.run()
            seen.append(found[: int(received.sum())].tolist() + passed.tolist())
        return seen

    def want(rank: int, i: int) -> list[list[float]]:
        count, own, other = (i % 3, 2 - i % 2)[rank], [float(i)] * 2, [10.0 + i] * 2
        return [own] * count + [other] * count + [own if rank else other]

    assert forks(2, lambda comm: _same(work(comm), [want(comm.rank, i) for i in range(1, 4)])) == [0, 0]


def _same(found: object, want: object) -> None:
    assert found == want, (found, want)


def test_what_is_sent_waits_until_it_is_received() -> None:
    file, ops = shared_memory(comm_bytes(2)), backend("reference")
    first, second = (SharedComm(file, rank, 2, crowded=True) for rank in (0, 1))
    tensors = [part(i, 1, PIECE // 4) for i in range(16)]
    for x in tensors:
        first.send(ops, x, 1)  # all pieces that have room
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.send, ops, part(16, 1, 1), 1)
        time.sleep(0.05)
        assert not waiting.done()
        for x in tensors:
            assert torch.equal(second.recv(ops, torch.empty_like(x), 0), x)
        waiting.result(timeout=30)
    with pytest.raises(ValueError, match="another size"):
        second.recv(ops, torch.empty(2), 0)
    os.close(file)


@pytest.mark.parametrize("what", ["reduce_scatter", "all_gather", "all_to_all", "broadcast", "send", "recv"])
def test_nobody_waits_for_a_rank_that_has_left(what: str) -> None:
    file, ops = shared_memory(comm_bytes(2)), backend("reference")
    first, second = (SharedComm(file, rank, 2, crowded=True) for rank in (0, 1))
    x = torch.ones(2, 40 * PIECE // 8)
    calls = {
        "reduce_scatter": lambda: first.reduce_scatter(ops, x, (1, 1)),
        "all_gather": lambda: first.all_gather(ops, x, (2, 1)),
        "all_to_all": lambda: first.all_to_all(ops, x, torch.ones(2, dtype=torch.int32), 2),
        "broadcast": lambda: first.broadcast(ops, x, 0),
        "send": lambda: first.send(ops, x, 1),
        "recv": lambda: first.recv(ops, x, 1),
    }
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(calls[what])
        second.leave()
        with pytest.raises(ValueError, match="a rank of the group has ended"):
            waiting.result(timeout=30)
    os.close(file)


def test_patience_ends_the_group() -> None:
    file, ops = shared_memory(comm_bytes(2)), backend("reference")
    first = SharedComm(file, 0, 2, crowded=True, patience_s=0.2)
    second = SharedComm(file, 1, 2, crowded=True)
    with pytest.raises(ValueError, match="has not come in time"):
        first.all_reduce(ops, torch.ones(1, 4))
    with pytest.raises(ValueError, match="a rank of the group has ended"):
        second.all_reduce(ops, torch.ones(1, 4))
    os.close(file)


def test_counts_that_cannot_be_fail_on_all_ranks_which_may_go_on() -> None:
    ops = backend("reference")

    def work(comm: Comm) -> list[str]:
        errors = []
        for sends in ([1, 9], [1, -1], [3, 2]):
            own = torch.tensor(sends if comm.rank else [1, 1], dtype=torch.int32)
            with pytest.raises(ValueError, match="all_to_all") as error:
                comm.all_to_all(ops, torch.ones(6, 2), own, 3)
            errors.append(str(error.value))
        assert torch.equal(comm.all_reduce(ops, part(comm.rank, 3, 3)), summed(2, 3, 3))
        return errors

    has, room = "a rank sends rows that it does not have", "a rank is sent more rows than there is room for"
    assert each(2, work) == [[f"all_to_all: {why}" for why in (has, has, room)]] * 2


def test_what_cannot_be_exchanged_is_said() -> None:
    file, ops = shared_memory(comm_bytes(2)), backend("reference")
    comm, x = SharedComm(file, 0, 2), torch.ones(2, 3)
    for call, why in (
        (lambda: comm.all_reduce(ops, x.double()), "need a contiguous float32"),
        (lambda: comm.reduce_scatter(ops, x, (1, 2)), r"of shape \[3, -1\]"),
        (lambda: comm.all_gather(ops, x, (2,)), "are not the parts of 2 ranks"),
        (lambda: comm.all_gather(ops, x.to(torch.int8), (2, 2)), "whole numbers of 4 bytes"),
        (lambda: comm.all_to_all(ops, x, torch.ones(3, dtype=torch.int32), 4), r"of shape \[2\]"),
        (lambda: comm.send(ops, x, 0), "rank 0 is this one"),
        (lambda: comm.recv(ops, x, 2), "there is no rank 2 of 2"),
        (lambda: comm.broadcast(ops, x.T, 0), "need a contiguous array"),
    ):
        with pytest.raises(ValueError, match=why):
            call()
    os.close(file)


def test_rank_0_listens_to_what_others_say() -> None:
    def work(comm: SharedComm) -> list[bytes | None]:
        if comm.rank:
            for i in range(40):
                comm.say(bytes([comm.rank]) * i)
            return []
        heard = [comm.listen(rank, 60_000) for i in range(40) for rank in (1, 2)]
        return [*heard, comm.listen(1), comm.listen(2, 1)]

    assert each(3, work)[0] == [bytes([rank]) * i for i in range(40) for rank in (1, 2)] + [None, None]
