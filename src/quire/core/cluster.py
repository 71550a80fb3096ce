"""Several hosts that serve one model together, and how they know each other."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.core.errors import ConfigError
from quire.core.exclusions.features import (
    HOSTS,
    HOSTS_WITHOUT_RAY,
    NO_MASTER_ADDR,
    NO_RAY,
    NO_SECRET,
    RAY,
    RAY_ADDRESS,
    Feature,
    found,
)
from quire.core.options.fields import about

MOST_NODES = 64
BACKENDS = ("mp", "ray")


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Names are vLLM's where it has them. Without a word of `interface` a host is reached, and listens, at the address
    by which it reaches the first one: that one's is `master_addr`.
    """

    nnodes: Annotated[int, about("Number of machines that serve together.", ge=1, le=MOST_NODES)] = 1
    node_rank: Annotated[int, about("Number of this machine; 0 = the one that clients talk to.")] = 0
    master_addr: Annotated[str | None, about("Address at which the other hosts reach host 0.")] = None
    master_port: Annotated[int, about("Port that each host listens on for the others.", ge=1, le=65535)] = 29501
    interface: Annotated[
        str | None, about("Network interface for other hosts, or an address of it; nothing listens elsewhere.")
    ] = None
    cluster_secret_file: Annotated[
        str | None, about("File of at least 32 bytes, the same on all hosts: who does not know it is not listened to.")
    ] = None
    distributed_executor_backend: Annotated[
        str, about("Who starts and watches this server's part of other hosts: quire there (mp), or Ray.", BACKENDS)
    ] = "mp"
    ray_address: Annotated[
        str | None, about("A Ray cluster that runs already, as HOST:PORT or auto; else one is started on loopback.")
    ] = None

    @property
    def by_ray(self) -> bool:
        """Whether Ray says where engines run."""
        return self.distributed_executor_backend == "ray"

    @property
    def features(self) -> frozenset[Feature]:
        """What is asked for, as far as it excludes something."""
        several = self.nnodes > 1
        return found(
            (HOSTS, several), (HOSTS_WITHOUT_RAY, several and not self.by_ray), (RAY, self.by_ray),
            (NO_RAY, not self.by_ray), (RAY_ADDRESS, self.ray_address is not None),
            (NO_MASTER_ADDR, self.master_addr is None), (NO_SECRET, self.cluster_secret_file is None),
        )  # fmt: skip

    def validate(self) -> None:
        """Refuse values that cannot work, naming the option."""
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"--node-rank {self.node_rank} must lie in [0, {self.nnodes})", param="node_rank")

    def check_hosts(self, processes: int, ranks: int) -> None:
        """Refuse numbers that do not fill the hosts; `ranks` of one engine, `processes` of all."""
        here = processes // self.nnodes
        if processes % self.nnodes or (here % ranks and ranks % here):
            raise ConfigError(
                f"--nnodes {self.nnodes}: {processes} processes, {ranks} for each engine, do not fill hosts evenly; "
                "each host takes as many, and engines fill whole hosts or share one; change --data-parallel-size or "
                "--tensor-parallel-size",
                param="nnodes",
            )

    def node_of(self, rank: int, processes: int) -> int:
        """The host of one of `processes`: each host has as many, in order."""
        return rank * self.nnodes // processes
