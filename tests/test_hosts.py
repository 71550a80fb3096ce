"""Replicas on several hosts: kill -9 of each process, a cut cable, and who listens where; every answer is as alone."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from live_server import wait_until
from networks import ADDRESSES, Network, why_not
from oracle import BACKENDS
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.core.files import sampled_digest
from quire.engine.hosts.agent import _stay
from quire.engine.hosts.nodes import JoinedNodes
from quire.engine.hosts.placing import check_same
from quire.parallel.link import dial
from quire.parallel.wire import ConnectionDropped, read_secret
from stub_engine import stub_info
from test_chaos import STREAMS, Load, bodies, metric, restarts, wait_for_more
from test_replay import texts_of
from test_server_death import Serving, children

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
LOOPBACK = ("127.0.0.1", "127.0.0.2")
PORT = 29000 + os.getpid() % 900


class Hosts:
    """`quire serve` on two hosts, one replica on each; clients come over a socket file, as no address is shared."""

    def __init__(self, folder: Path, addresses: Sequence[str], within: Sequence[list[str]], *words: str) -> None:
        secret, self._uds = folder / "secret", str(folder / "http")
        secret.write_text(os.urandom(32).hex())
        secret.chmod(0o600)
        self._words = [
            "--nnodes", "2", "--master-addr", addresses[0], "--master-port", str(PORT), "--cluster-secret-file",
            str(secret), "--num-blocks", "400", *(words or ("--data-parallel-size", "2")),
        ]  # fmt: skip
        self._addresses, self._within = addresses, within
        self.first = Serving(*self._words, "--uds", self._uds, within=within[0])
        self.second = self.join()

    def join(self) -> Serving:
        """The second host's agent, started."""
        self.second = Serving(
            *self._words, "--node-rank", "1", "--interface", self._addresses[1], within=self._within[1]
        )
        return self.second

    @contextlib.contextmanager
    def up(self) -> Iterator[httpx.Client]:
        with self.first:
            try:
                wait_until(lambda: "serving" in "".join(self.first.log), seconds=120)
                transport = httpx.HTTPTransport(uds=self._uds)
                with httpx.Client(transport=transport, base_url="http://localhost", timeout=120.0) as client:
                    yield client
            except BaseException:
                print("".join(["host 0\n", *self.first.log, "host 1\n", *self.second.log])[-6000:])
                raise
            finally:
                self.second.__exit__()
        for log in (self.first.log, self.second.log):
            text = "".join(log)
            assert "Traceback" not in text or "a rank of the group has ended" in text, text[-3000:]


@contextlib.contextmanager
def loaded(hosts: Hosts, **fields: object) -> Iterator[httpx.Client]:
    """A client, with requests running all the time, each of which is to be as alone."""
    with hosts.up() as client:
        asked = [body | fields for body in bodies(STREAMS)]
        alone = [texts_of(client.post("/v1/completions", json=body)) for body in asked]
        load = Load(client, asked)
        wait_for_more(client, 10 * STREAMS)
        try:
            yield client
        except BaseException:
            load._stop.set()
            raise
        wait_for_more(client, 10 * STREAMS)
        load.finish(alone)


def listening(pid: int) -> set[str]:
    """Addresses, in hexadecimal, at which a process takes connections in its own namespace."""
    inodes = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if f"socket:[{words[9]}]" in inodes and (words[3] == "0A" or table.startswith("udp")):
                found.add(words[1])
    return found


def family(pid: int) -> list[int]:
    """Children, and theirs."""
    return [each for child in children(pid) for each in (child, *family(child))]


def hexadecimal(address: str, port: int = PORT) -> str:
    return "".join(f"{int(part):02X}" for part in reversed(address.split("."))) + f":{port:04X}"


@pytest.mark.slow
def test_whatever_is_killed_on_either_host_nothing_is_lost(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, LOOPBACK, [[], []], "--data-parallel-size", "2", "--max-engine-deaths", "100")
    with loaded(hosts, max_tokens=60) as client:
        for server, address in ((hosts.first, LOOPBACK[0]), (hosts.second, LOOPBACK[1])):
            found = [listening(pid) for pid in (server.process.pid, *children(server.process.pid))]
            assert set().union(*found) == {hexadecimal(address)}
        os.kill(hosts.first.engine, signal.SIGKILL)
        wait_until(lambda: restarts(client) == 1, seconds=60)
        wait_for_more(client, 10 * STREAMS)
        os.kill(hosts.second.engine, signal.SIGKILL)
        wait_until(lambda: restarts(client) == 2, seconds=60)
        wait_for_more(client, 10 * STREAMS)
        engine = hosts.second.engine
        os.kill(hosts.second.process.pid, signal.SIGKILL)
        hosts.second.__exit__()
        wait_until(lambda: not Path(f"/proc/{engine}").exists(), seconds=10)
        wait_for_more(client, 10 * STREAMS)
        hosts.join()
        wait_until(lambda: restarts(client) == 3, seconds=60)
        os.kill(hosts.first.process.pid, signal.SIGUSR1)
        wait_until(lambda: restarts(client) == 5, seconds=60)


@pytest.mark.slow
def test_hosts_that_gather_weights_wait_for_one_that_is_gone(tmp_path: Path) -> None:
    words = ["--data-parallel-size", "2", "--fully-shard", "--max-engine-deaths", "100"]
    hosts = Hosts(tmp_path, LOOPBACK, [[], []], *words)
    with loaded(hosts, max_tokens=60) as client:
        for count, server in enumerate((hosts.first, hosts.second)):
            os.kill(server.engine, signal.SIGKILL)
            wait_until(lambda count=count: restarts(client) == 1 + count, seconds=60)  # type: ignore[misc]
            wait_for_more(client, 10 * STREAMS)
        os.kill(hosts.second.process.pid, signal.SIGKILL)
        hosts.second.__exit__()
        wait_until(lambda: client.get("/readyz").status_code == 503, seconds=30)
        hosts.join()
        wait_until(lambda: restarts(client) == 4, seconds=60)
        wait_for_more(client, 10 * STREAMS)


@pytest.mark.slow
def test_ranks_on_two_hosts_say_what_they_say_on_one_whatever_is_killed(tmp_path: Path) -> None:
    words = ["--tensor-parallel-size", "2", "--max-engine-deaths", "100"]
    asked = [body | {"max_tokens": 24} for body in bodies(STREAMS)]
    with Serving(*words, "--num-blocks", "400") as one, one.up() as client:
        client.timeout = httpx.Timeout(120.0)
        want = [texts_of(client.post("/v1/completions", json=body)) for body in asked]
    hosts = Hosts(tmp_path, LOOPBACK, [[], []], *words)
    with loaded(hosts, max_tokens=24) as client:
        assert [texts_of(client.post("/v1/completions", json=body)) for body in asked] == want
        pids = [hosts.first.process.pid, *family(hosts.first.process.pid)], [*family(hosts.second.process.pid)]
        for found, address in zip(pids, LOOPBACK, strict=True):
            where = {each.split(":")[0] for pid in found for each in listening(pid)}
            assert where == {hexadecimal(address).split(":")[0]}
        (rank,) = children(hosts.second.process.pid)
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: restarts(client) == 1, seconds=120)
        wait_for_more(client, 10 * STREAMS)
        os.kill(hosts.first.engine, signal.SIGKILL)
        wait_until(lambda: restarts(client) == 2, seconds=120)
        wait_for_more(client, 10 * STREAMS)
        os.kill(hosts.second.process.pid, signal.SIGKILL)
        hosts.second.__exit__()
        hosts.join()
        wait_until(lambda: restarts(client) == 3, seconds=120)


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_a_cut_cable_is_a_pause_and_a_long_one_moves_requests(tmp_path: Path) -> None:
    with Network() as network:
        hosts = Hosts(tmp_path, ADDRESSES, [network.within(0), network.within(1)])
        with loaded(hosts) as client:
            for server, address in ((hosts.first, ADDRESSES[0]), (hosts.second, ADDRESSES[1])):
                found = [listening(pid) for pid in (server.process.pid, *children(server.process.pid))]
                assert set().union(*found) == {hexadecimal(address)}
            network.cut()
            before = metric(client, "vllm:generation_tokens_total")
            wait_until(lambda: metric(client, "vllm:generation_tokens_total") > before + 50, seconds=20)
            network.mend()
            wait_for_more(client, 10 * STREAMS)
            assert restarts(client) == 0, "a short one is waited for"
            network.cut()
            wait_until(lambda: "host 1 is gone" in "".join(hosts.first.log), seconds=30)
            wait_for_more(client, 10 * STREAMS)
            network.mend()
            wait_until(lambda: restarts(client) == 1, seconds=60)


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_ranks_wait_for_a_cable_that_was_cut(tmp_path: Path) -> None:
    with Network() as network:
        words = ["--pipeline-parallel-size", "2", "--max-engine-deaths", "1"]
        hosts = Hosts(tmp_path, ADDRESSES, [network.within(0), network.within(1)], *words)
        with loaded(hosts, max_tokens=24) as client:
            network.cut()
            wait_until(lambda: "a host with other ranks is gone" in "".join(hosts.first.log), seconds=30)
            network.mend()
            wait_until(lambda: restarts(client) >= 1, seconds=120)


def test_a_second_host_of_one_number_and_one_of_another_cluster_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(os.urandom(32).hex())
    (tmp_path / "secret").chmod(0o600)
    given = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": PORT + 1, "data_parallel_size": 2}
    config = flat_config(**given, cluster_secret_file=str(tmp_path / "secret"))
    second = flat_config(**given, cluster_secret_file=str(tmp_path / "secret"), node_rank=1)
    third = flat_config(**given | {"nnodes": 4, "data_parallel_size": 4}, cluster_secret_file="-", node_rank=3)
    secret, at = read_secret(tmp_path / "secret"), ("127.0.0.1", PORT + 1)
    with contextlib.closing(JoinedNodes(config)) as nodes, ThreadPoolExecutor(1) as pool:
        joined = dial(at, secret)
        stays = pool.submit(_stay, joined, second, ("127.0.0.2", 1))
        wait_until(lambda: nodes.address(1) == ("127.0.0.2", 1))
        for other, address, why in ((second, ("127.0.0.3", 1), "there is a host 1 already, at 127.0.0.2:1"),
                                    (third, ("127.0.0.3", 1), "it is host 3 of 4, and there are 2")):  # fmt: skip
            with pytest.raises(ConfigError, match=why):
                _stay(dial(at, secret), other, address)
        joined.close()
        with pytest.raises(ConnectionDropped):
            stays.result(timeout=10)
        wait_until(lambda: nodes.address(1) is None)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"nnodes": 2}, "needs --master-addr"),
        ({"nnodes": 2, "master_addr": "127.0.0.1"}, "needs --cluster-secret-file"),
        ({"nnodes": 2, "node_rank": 2}, "must lie in"),
        ({"nnodes": 0}, "must lie in"),
        ({"nnodes": 2, "master_addr": "a", "cluster_secret_file": "f"}, "do not fill hosts evenly"),
        ({"ray_address": "auto"}, "needs --distributed-executor-backend ray"),
        ({"distributed_executor_backend": "uni"}, "is not one of"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        flat_config(**options)


def test_replicas_that_would_answer_otherwise_are_refused(tmp_path: Path) -> None:
    first = stub_info(weights="a", isa="avx512")
    check_same(first, stub_info(weights="a", isa="avx512", num_blocks=7, threads=3), 1)
    for name, value in (("weights", "b"), ("isa", "avx2"), ("dtype", "bfloat16")):
        with pytest.raises(ConfigError, match=f"replica 1 differs .*: {name} is '{value}'"):
            check_same(first, replace(first, **{name: value}), 1)
    for name, middle in (("one", b"a"), ("copy", b"a"), ("other", b"b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(300_000) + middle + bytes(300_000))
    one, copy, other = (sampled_digest(tmp_path / name) for name in ("one", "copy", "other"))
    assert one == copy != other
