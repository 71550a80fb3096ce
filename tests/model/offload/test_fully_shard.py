"""Replicas that keep one copy of their layers: the same bits, one copy, and who writes it when one dies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from offloaded_model import OPTIONS, answers
from oracle import BACKENDS, write
from quire.core.config import flat_config
from quire.core.errors import ConfigError, ModelError
from quire.core.machine import memory_file
from quire.core.tree_map import parts_of
from quire.engine.engine import Engine
from quire.engine.start import start_engine
from quire.model.offload.offloaded import PAGE
from quire.model.offload.shared_host import Shards
from quire.ops.weights import Packed
from quire.parallel.link import Link, Listener, dial
from quire.parallel.weight_shares import ASK, HEADER, REQUEST, RemoteShare, serve
from quire.parallel.wire import ConnectionDropped

pytestmark = [
    pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="memory without a name"),
]
SHARDED: dict[str, Any] = {"data_parallel_size": 2, "fully_shard": True}


def addresses(engine: Engine) -> list[int]:
    """Where the matrices of layers begin."""
    layers = engine.model.decoder.layers  # type: ignore[attr-defined]
    return [packed.handle.codes for packed in parts_of(layers, Packed)]


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"quantization": "int4"}], ids=["f32", "int4"])
def test_replicas_with_one_copy_say_what_one_alone_says(options: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "llama", num_hidden_layers=4)
    config = OPTIONS | options | {"model": str(tmp_path)}
    want, file = answers(start_engine(flat_config(**config))), memory_file()
    first = start_engine(flat_config(**config | SHARDED), shards=Shards(file))
    size = os.fstat(file).st_blocks * 512
    second = start_engine(flat_config(**config | SHARDED), shards=Shards(file))
    assert answers(first) == want == answers(second)
    assert os.fstat(file).st_blocks * 512 == size > 0, "the second added nothing"
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:quire" in line]
    spans = [(*(int(a, 16) for a in line[0].split("-")), line[1]) for line in maps]
    for at in (*addresses(first), *addresses(second)):
        assert any(begin <= at < end for begin, end, _ in spans), "a layer's matrix is elsewhere"
    os.close(file)


def test_weights_of_other_files_are_found_out(tmp_path: Path) -> None:
    file = memory_file()
    for seed in (0, 1):
        write(tmp_path / str(seed), "llama", seed=seed)
    config = OPTIONS | SHARDED
    start_engine(flat_config(model=str(tmp_path / "0"), **config), shards=Shards(file))
    with pytest.raises(ModelError, match="layer 0 is not what another replica made"):
        start_engine(flat_config(model=str(tmp_path / "1"), **config), shards=Shards(file))
    os.close(file)


DIES = """
import os, sys
from quire.model.offload.shared_host import SharedFile
assert SharedFile(int(sys.argv[1])).writes
os.ftruncate(int(sys.argv[1]), 1 << 20)
print("locked", flush=True)
sys.stdin.read()
os._exit(9)
"""


def test_who_waits_for_a_replica_that_dies_writes_in_its_place(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    file, config = memory_file(), OPTIONS | SHARDED | {"model": str(tmp_path)}
    command = [sys.executable, "-c", DIES, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(file,)) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(start_engine, flat_config(**config), None, Shards(file))
            with pytest.raises(TimeoutError):
                loading.result(timeout=1.5)
            other.stdin.close()
            engine = loading.result(timeout=60)
    assert answers(engine) == answers(start_engine(flat_config(**OPTIONS | {"model": str(tmp_path)})))
    os.close(file)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fully_shard": True}, "there is one replica"),
        (SHARDED | {"tensor_parallel_size": 2}, "have shares of the weights already"),
        (SHARDED | {"weight_offload": "disk"}, "cannot be shared in memory"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        flat_config(**options)
    assert refused.value.param == "fully_shard"


def test_an_engine_of_this_process_has_nobody_to_share_with(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    with pytest.raises(ConfigError, match="use quire serve"):
        start_engine(flat_config(model=str(tmp_path), **OPTIONS | SHARDED))


class Host:
    """A host's share of the weights, served at an address of its own."""

    def __init__(self, secret: bytes) -> None:
        self.file, self.secret = memory_file(), secret
        self.listener = Listener(("127.0.0.1", 0), secret, self._serve)

    def _serve(self, link: Link) -> None:
        assert link.receive(5.0) == ASK
        serve(link, self.file)

    def engine(self, node: int, hosts: Sequence[Host], **options: Any) -> Engine:
        """One of this host's replicas."""
        far = tuple(None if host is self else RemoteShare(host.listener.address, self.secret) for host in hosts)
        return start_engine(flat_config(**OPTIONS | SHARDED | options), shards=Shards(self.file, node, far))

    def close(self) -> None:
        """The file stays: links may still be served from it."""
        self.listener.close()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"quantization": "int4"}], ids=["f32", "int4"])
def test_hosts_gather_what_each_has_a_share_of(count: int, options: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "llama", num_hidden_layers=5)
    options = options | {"model": str(tmp_path)}
    want, secret = answers(start_engine(flat_config(**OPTIONS | options))), os.urandom(32)
    hosts = [Host(secret) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        engines = list(pool.map(lambda i: hosts[i].engine(i, hosts, **options), range(count)))
    sources: list[Any] = [engine.model.decoder.source for engine in engines]  # type: ignore[attr-defined]
    sizes = [os.fstat(host.file).st_size - PAGE for host in hosts]
    assert sum(sizes) == sources[0].nbytes and max(sizes) - min(sizes) <= 5 * count * PAGE
    for engine, source in zip(engines, sources, strict=True):
        before = source.counts().read
        assert answers(engine) == want
        assert source.counts().read - before > 5 * source.nbytes, "every step gathered them"
    again = hosts[0].engine(0, hosts, **options)
    assert answers(again) == want, "one that is started again finds its host's share"
    again.close()
    for host in hosts:
        host.close()


def test_a_host_that_is_gone_ends_the_step_and_is_waited_for_by_the_next_engine(tmp_path: Path) -> None:
    write(tmp_path, "llama", num_hidden_layers=4)
    secret, options = os.urandom(32), {"model": str(tmp_path), "dtype": "float32"}
    hosts = [Host(secret) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(lambda i: hosts[i].engine(i, hosts, **options), range(2))
        want = answers(first)
        for share in first.model.decoder.source.keeps:  # type: ignore[attr-defined]
            share.leave()
        with pytest.raises(ValueError, match="weights cannot be read"):
            answers(first)
        again = pool.submit(hosts[0].engine, 0, hosts, **options)
        assert answers(again.result(timeout=60)) == want
    for host in hosts:
        host.close()


def test_who_asks_for_what_is_not_there_is_dropped() -> None:
    host = Host(os.urandom(32))
    os.pwrite(host.file, HEADER.pack(2 * PAGE), 0)
    for asked in (REQUEST.pack(PAGE, 2 * PAGE), REQUEST.pack(-1, 1), b"x"):
        link = dial(host.listener.address, host.secret)
        link.send(ASK)
        link.send(asked)
        with pytest.raises(ConnectionDropped):
            link.receive(5.0)
    host.close()
