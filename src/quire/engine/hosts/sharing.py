"""Where an engine finds the weights that replicas keep together (`--fully-shard`)."""

from __future__ import annotations

from pathlib import Path

from quire.core.config import EngineConfig
from quire.model.offload.shared_host import Shards
from quire.parallel.weight_shares import RemoteShare
from quire.parallel.wire import read_secret


def shards_of(config: EngineConfig, file: int) -> Shards:
    """`file`: the descriptor of this host's share; the others are at `config.hosts`, where there are any."""
    if not config.hosts:
        return Shards(file)
    cluster = config.cluster
    secret, own = read_secret(Path(cluster.cluster_secret_file or "")), cluster.node_rank
    hosts = (None if node == own else RemoteShare(address, secret) for node, address in enumerate(config.hosts))
    return Shards(file, own, tuple(hosts))
