"""Ranks that have a GPU each: what they can do, and what joins them."""

from __future__ import annotations

import os
import tempfile

from msgspec.structs import replace

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.exclusions.exclusion import Known
from quire.core.exclusions.features import GPU_PROCESSES
from quire.core.exclusions.table import check_known
from quire.ops.choice import backend_of
from quire.ops.lazy import torch
from quire.parallel.comm import Comm
from quire.parallel.topology import Topology

LOAD_SECONDS = 600.0
"""That ranks may load longer than others: the first collective waits for all."""


def on_gpus(config: EngineConfig) -> bool:
    """Whether each rank computes on a GPU, or on the CPU under Triton's interpreter."""
    return backend_of(config.device) == "triton"


def of_a_gpu(config: EngineConfig) -> EngineConfig:
    """`config` as each rank has it: what ranks exchange is no part of a graph, and what a step ahead would look up is
    the first rank's. `ConfigError` for what is not built, with the reason."""
    check_known(config.features, Known(frozenset({GPU_PROCESSES})))
    parallel, name = config.parallel, config.parallel.ranks_option
    from quire.ops.triton.gpu import interpreting

    there = parallel.ranks if interpreting() else torch.cuda.device_count()
    if there < parallel.ranks:
        raise ConfigError(
            f"--{name.replace('_', '-')} {parallel.ranks}: each rank needs a GPU, and {there} "
            f"{'is' if there == 1 else 'are'} there",
            param=name,
        )
    device = replace(config.device, enforce_eager=True)
    return replace(config, device=device, scheduler=replace(config.scheduler, async_scheduling=False))


def take_gpu(rank: int) -> None:
    """Compute on that one."""
    from quire.ops.triton.gpu import interpreting

    if not interpreting():
        torch.cuda.set_device(rank)


def meeting_place() -> str:
    """A file in which ranks of this host find each other; no port is listened at for that."""
    handle, path = tempfile.mkstemp(prefix="quire-ranks-")
    os.close(handle)
    return path


def comms_of(path: str, rank: int, topology: Topology) -> dict[str, Comm]:
    """What joins `rank` with all others, which come here at once: NCCL, or gloo under the interpreter."""
    from torch._C._distributed_c10d import FileStore

    from quire.ops.triton.gpu import interpreting
    from quire.parallel.torch_distributed import DistributedComm, gloo_group, nccl_group

    world = topology.world
    store = FileStore(path, world)
    if interpreting():
        return {"tensor": DistributedComm(gloo_group(store, "tensor", rank, world, "127.0.0.1", LOAD_SECONDS))}
    return {"tensor": DistributedComm(nccl_group(store, "tensor", rank, world, "lo", LOAD_SECONDS))}
