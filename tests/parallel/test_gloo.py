"""`Comm` over torch.distributed on loopback: the collectives and bits of `SharedComm`, and what is listened on."""

from __future__ import annotations

import os
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from group import SECRET, check_everything, part, summed
from group import each_over_gloo as each
from oracle import backend
from quire.core.errors import ConfigError
from quire.parallel.rendezvous_store import RemoteStore, serve
from quire.parallel.torch_distributed import DistributedComm, gloo_group, nccl_group
from quire.parallel.wire import ConnectionDropped, listen


@pytest.mark.parametrize("world", [2, 3])
def test_every_collective(world: int) -> None:
    ops = backend("reference")
    each(world, lambda comm: check_everything(comm, ops, 7001))


def listening() -> set[tuple[str, str]]:
    """Addresses and inodes of this process's sockets that listen."""
    own = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    found = set()
    for file in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.add((fields[1].partition(":")[0], fields[9]))
    return found


def test_nothing_listens_but_on_loopback() -> None:
    before = listening()
    found = each(2, lambda comm: (time.sleep(0.2), listening() - before))
    addresses = {address for _, sockets in found for address, _ in sockets}
    assert addresses == {"0100007F"}


def test_a_rank_that_does_not_come_ends_the_others() -> None:
    ops = backend("reference")

    def work(comm: DistributedComm) -> str:
        if comm.rank:
            time.sleep(1.5)
            comm.leave()
        with pytest.raises(ValueError, match="a rank of the group has") as error:
            comm.all_reduce(ops, torch.ones(1, 4))
        return str(error.value).rpartition("has ")[2]

    assert each(2, work, seconds=0.5) == ["not come in time", "ended"]


def test_a_rank_that_dies_ends_the_others() -> None:
    ops, listener = backend("reference"), listen("127.0.0.1", 0)
    host, port = listener.getsockname()
    child = os.fork()
    if not child:
        code = 1
        try:
            comm = DistributedComm(gloo_group(RemoteStore(host, port, SECRET, 1, 2), "all", 1, 2, "127.0.0.1"))
            assert torch.equal(comm.all_reduce(ops, part(1, 3, 5)), summed(2, 3, 5))
            code = 7
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    comm = DistributedComm(gloo_group(serve(listener, SECRET, 2), "all", 0, 2, "127.0.0.1"))
    assert torch.equal(comm.all_reduce(ops, part(0, 3, 5)), summed(2, 3, 5))
    begin = time.monotonic()
    with pytest.raises(ValueError, match="a rank of the group has ended"):
        comm.all_reduce(ops, part(0, 3, 5))
    assert time.monotonic() - begin < 10
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    listener.close()


def test_who_has_another_secret_gets_no_address() -> None:
    listener = listen("127.0.0.1", 0)
    host, port = listener.getsockname()
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve, listener, SECRET, 2, 1.0)
        with pytest.raises(ConnectionDropped):
            RemoteStore(host, port, b"t" * 32, 1, 2)
        with pytest.raises(ConfigError, match="have not joined"):
            serving.result()
    listener.close()


def test_stores_agree() -> None:
    listener = listen("127.0.0.1", 0)
    host, port = listener.getsockname()
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve, listener, SECRET, 2, 2.0)
        asked, own = RemoteStore(host, port, SECRET, 1, 2, 1.0), serving.result()
    asked.set("a", b"1")
    own.set("b", "two")
    assert own.get("a") == b"1" == asked.get("a") and asked.get("b") == b"two"
    assert asked.check(["a", "b"]) and not asked.check(["c"]) and asked.num_keys() == own.num_keys()
    assert asked.add("n", 3) == 3 and own.add("n", 2) == 5 and asked.delete_key("a") and not own.check(["a"])
    with pytest.raises(RuntimeError):
        asked.wait(["c"])
    asked.close()
    with pytest.raises(RuntimeError, match="is closed"):
        asked.get("b")
    listener.close()


def test_what_cannot_be_exchanged_is_said() -> None:
    ops, x = backend("reference"), torch.ones(2, 3)

    def work(comm: DistributedComm) -> None:
        for call, why in (
            (lambda: comm.all_reduce(ops, x.double()), "need a contiguous torch.float32"),
            (lambda: comm.all_gather(ops, x, (2,)), "are not the parts of 2 ranks"),
            (lambda: comm.send(ops, x, comm.rank), "is this one"),
            (lambda: comm.recv(ops, x, 2), "there is no rank 2 of 2"),
            (lambda: comm.broadcast(ops, x.T, 0), "need a contiguous tensor"),
            (lambda: comm.all_to_all(ops, x, torch.tensor([9, 0], dtype=torch.int32), 3), "does not have"),
            (lambda: comm.all_to_all(ops, x, torch.tensor([2, 0], dtype=torch.int32), 3), "room for"),
        ):
            with pytest.raises(ValueError, match=why):
                call()

    each(2, work)


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_without_nccl_it_is_said() -> None:
    with pytest.raises(ConfigError, match="without NCCL"):
        nccl_group(torch.distributed.HashStore(), "all", 0, 1, "lo")
